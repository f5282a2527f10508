#include "core/optim/algorithms/onebit.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/log.h"
#include "core/base/text.h"

namespace sotto {

bool OneBitAlgorithm::masks_zero_variance() const {
  return !d_.compat() && d_.config.sotto.zero_variance_policy == ZeroVariancePolicy::kMask;
}

Status OneBitAlgorithm::check_setting(std::string_view name, size_t group, double value) const {
  const OptimizerParams& p = d_.groups[group];
  if (name != "eps" || value == p.eps || !stage_started_ || p.freeze.non_freeze) return ok_status();
  return invalid_state(
      "eps of group {} cannot change from {} to {}: the variance is frozen, and eps is part of "
      "what was frozen",
      group, p.eps, value);
}

// zero_variance_policy "error": the stage does not start with elements that have never had a
// gradient. v is the same on all ranks, so all of them stop here.
Status OneBitAlgorithm::start_stage() {
  if (d_.config.sotto.zero_variance_policy != ZeroVariancePolicy::kError) return ok_status();
  SOTTO_ASSIGN(const std::vector<float> v,
               d_.access.download<float>(d_.arrays.data("v"), d_.layout->flat_elements()));
  for (uint32_t t = 0; t < d_.parameters.size(); ++t) {
    if (!d_.layout->compressed(t)) continue;
    const ParamSpec& param = d_.parameters[t];
    for (const Piece& p : d_.layout->tensor_pieces(t)) {
      for (uint64_t j = 0; j < p.count; ++j) {
        if (v[p.flat + j] != 0.0f || (param.mask != nullptr && param.mask[p.offset + j] == 0))
          continue;
        return invalid_state(
            "the compressed stage cannot start: element {} of \"{}\" has variance 0 (its gradient "
            "was always 0); mask it, or set sotto.zero_variance_policy to \"mask\" or \"eps\"",
            p.offset + j, param.name);
      }
    }
  }
  return ok_status();
}

void OneBitAlgorithm::report_tensor(const TensorState& state,
                                    nlohmann::ordered_json* tensor) const {
  (*tensor)["c_avg"] = state.c_avg;
  (*tensor)["last_factor"] = state.last_factor;
  (*tensor)["scaling_coeff"] = state.scaling_coeff;
}

bool OneBitAlgorithm::late_stage(uint64_t step) const {
  return step != 0 && d_.layout->instances() != 0 && late_after(d_.state_step(step));
}

// ---- frozen parameters ----

Status OneBitAlgorithm::freeze(const std::vector<uint8_t>& flags) {
  SOTTO_TRY(warn_of_still(flags));
  SOTTO_TRY(momentum_to_floats());
  Frozen restored = std::exchange(restored_, {});  // as long as the parameters it is of
  if (restored.step != d_.step || restored.flags != flags) restored.exchanged.clear();
  return set_momentum_aside(d_.parameters.frozen(), flags, restored.exchanged);
}

Status OneBitAlgorithm::warn_of_still(const std::vector<uint8_t>& flags) const {
  const std::vector<uint8_t>& before = d_.parameters.frozen();
  if (!stage_started_ || !masks_zero_variance() || before.empty()) return ok_status();
  SOTTO_ASSIGN(const std::vector<uint8_t> valid, d_.valid_bits());
  const auto counts = [&](uint64_t f) { return ((valid[f / 8] >> (7 - f % 8)) & 1u) != 0; };
  const auto some = [&](const Piece& p) {
    uint64_t i = 0;
    while (i < p.count && !counts(p.flat + i)) ++i;
    return i < p.count;
  };
  for (uint32_t t = 0; t < before.size() && !valid.empty(); ++t) {
    const bool trains = before[t] != 0 && (flags.empty() || flags[t] == 0);
    if (!trains || d_.parameters[t].count == 0 || !d_.layout->compressed(t)) continue;
    if (std::ranges::any_of(d_.layout->tensor_pieces(t), some)) continue;
    log(LogLevel::kWarn,
        "parameter \"{}\" is no longer frozen and still stands still: it had no gradient before "
        "compression began, so it has no variance (sotto.zero_variance_policy \"mask\")",
        printable(d_.parameters[t].name, 300));
  }
  return ok_status();
}

// Gives the momentum that was put aside back to the parameters with a flag in `back`, and puts
// aside, and sets to 0, that of the parameters in `flags`, or to what a state has been exchanging
// there. All on the host: it happens when parameters are frozen, not in steps.
Status OneBitAlgorithm::set_momentum_aside(const std::vector<uint8_t>& back,
                                           const std::vector<uint8_t>& flags,
                                           std::span<const float> exchanged) {
  SOTTO_ASSIGN(std::vector<float> flat,
               d_.access.download<float>(d_.arrays.data("m"), d_.layout->flat_elements()));
  const auto each = [&](const std::vector<uint8_t>& of, auto&& f) {
    for (uint32_t t = 0; t < of.size(); ++t) {
      if (of[t] == 0) continue;
      for (const Piece& p : d_.layout->tensor_pieces(t))
        f(t, p, flat.begin() + static_cast<ptrdiff_t>(p.flat));
    }
  };
  if (!aside_m_.empty()) {
    each(back, [&](uint32_t t, const Piece& p, auto place) {
      std::copy_n(aside_m_[t].begin() + static_cast<ptrdiff_t>(p.offset), p.count, place);
    });
  }
  aside_m_.clear();
  std::vector<uint64_t> first(flags.size());
  uint64_t total = 0;
  for (size_t t = 0; t < flags.size(); ++t) {
    first[t] = total;
    if (flags[t] == 0) continue;
    total += d_.parameters[t].count;
    aside_m_.resize(flags.size());
    aside_m_[t].resize(d_.parameters[t].count);
  }
  if (exchanged.size() != total) exchanged = {};
  each(flags, [&](uint32_t t, const Piece& p, auto place) {
    std::copy_n(place, p.count, aside_m_[t].begin() + static_cast<ptrdiff_t>(p.offset));
    std::fill_n(place, p.count, 0.0f);
    if (!exchanged.empty()) std::copy_n(exchanged.begin() + first[t] + p.offset, p.count, place);
  });
  return d_.access.upload(d_.arrays.data("m"), std::span<const float>(flat));
}

bool OneBitAlgorithm::read_aside(const TensorRun& run, float* out) const {
  if (aside_m_.empty() || !d_.parameters.frozen(run.tensor)) return false;
  std::copy_n(aside_m_[run.tensor].begin() + static_cast<ptrdiff_t>(run.at), run.count, out);
  return true;
}

// Exchanged: in place of the momentum that was put aside.
Result<OneBitAlgorithm::Frozen> OneBitAlgorithm::frozen_now() const {
  if (aside_m_.empty() && restored_with(restored_.flags)) return restored_;
  Frozen out{d_.step, d_.parameters.frozen(), {}};
  const StateArray m = d_.arrays["m"];
  for (uint32_t t = 0; t < out.flags.size(); ++t) {
    if (out.flags[t] == 0) continue;
    SOTTO_TRY(for_each_tensor_run(*d_.layout, t, t + 1, [&](const TensorRun& run) -> Status {
      out.exchanged.resize(out.exchanged.size() + run.count);
      return read_state(d_.access, m, run,
                        out.exchanged.data() + (out.exchanged.size() - run.count));
    }));
  }
  return out;
}

// ---- state ----

Status OneBitAlgorithm::describe(StateErrors errors, OptimSnapshot* s) {
  s->set_flag("stage_started", stage_started_);
  SOTTO_ASSIGN(
      const std::vector<TensorState> states,
      d_.access.download<TensorState>(d_.arrays.data("tensor_states"), d_.parameters.size()));
  s->put("tensor_states", states);
  SOTTO_TRY(momentum_to_floats());
  if (errors != StateErrors::kOwn && synchronisation()) return ok_status();
  SOTTO_ASSIGN(const Frozen frozen, frozen_now());
  if (frozen.flags.empty()) return ok_status();
  s->put("frozen", frozen.flags);
  s->put("frozen_m", frozen.exchanged);
  return ok_status();
}

std::optional<Status> OneBitAlgorithm::stream(std::string_view array, StateErrors,
                                              const FloatSink& sink) {
  if (array != "m" || aside_m_.empty()) return std::nullopt;
  const StateArray m = d_.arrays["m"];
  std::vector<float> values;
  return for_each_run(*d_.layout, false, [&](const TensorRun& run) -> Status {
    values.resize(run.count);
    const Status read =
        read_aside(run, values.data()) ? ok_status() : read_state(d_.access, m, run, values.data());
    return read.ok() ? sink(values) : read;
  });
}

Status OneBitAlgorithm::check_frozen(const OptimSnapshot& s) const {
  if (!s.has("frozen")) return ok_status();
  SOTTO_TRY(check_values("flags of frozen parameters", s.bytes("frozen"), d_.parameters.size(), 1));
  SOTTO_ASSIGN(const std::vector<uint8_t> flags,
               d_.parameters.frozen_flags(s.values<uint8_t>("frozen")));
  uint64_t total = 0;
  for (size_t t = 0; t < flags.size(); ++t) total += flags[t] != 0 ? d_.parameters[t].count : 0;
  return check_values("exchanged momentum of frozen parameters", s.bytes("frozen_m"), total);
}

Status OneBitAlgorithm::check(const OptimSnapshot& s, StateErrors) const {
  SOTTO_TRY(check_frozen(s));
  SOTTO_TRY(check_values("per-tensor state", s.bytes("tensor_states"), d_.parameters.size(),
                         sizeof(TensorState)));
  if (s.flag("stage_started") && !says_late(s))
    return invalid_argument("the state's stage flags contradict each other");
  // Before the switch there has to be an average to divide.
  const uint64_t since = s.number("average_since");
  if (since > s.step || (since == s.step && s.step > 0 && late_stage(s.step)))
    return invalid_argument("the state's average trust ratios start after {} of {}", since,
                            counted(s.step, "update"));
  if (s.step_offset != d_.step_offset()) {
    return invalid_argument("the state has step_offset {}, this configuration {}", s.step_offset,
                            d_.step_offset());
  }
  return ok_status();
}

bool OneBitAlgorithm::restores(std::string_view array, const OptimSnapshot& s) const {
  return array == "m" || array == "v" || (keeps_stage(s) && s.bytes(array) != 0);
}

std::vector<TensorState> OneBitAlgorithm::tensor_states(const OptimSnapshot& s) const {
  return s.copy_of<TensorState>("tensor_states");
}

Status OneBitAlgorithm::restore(const OptimSnapshot& s) {
  SOTTO_TRY(d_.access.upload(d_.arrays.data("tensor_states"),
                             std::span<const TensorState>(tensor_states(s))));
  stage_started_ = keeps_stage(s);
  SOTTO_TRY(d_.write_valid_bits(stage_started_ && masks_zero_variance()));
  if (stage_started_) {
    std::vector<uint8_t> valid(d_.layout->flat_elements() / 8, 0xff);
    if (d_.masked && !d_.compat()) {
      SOTTO_ASSIGN(valid, d_.access.download<uint8_t>(d_.arrays.data("valid"), valid.size()));
    }
    SOTTO_TRY(restore_stage(valid));
  }
  aside_m_.clear();
  restored_ = {};
  if (s.has("frozen")) {
    SOTTO_ASSIGN(std::vector<uint8_t> flags,
                 d_.parameters.frozen_flags(s.values<uint8_t>("frozen")));
    restored_ = {s.step, std::move(flags), s.floats("frozen_m")};
  }
  const std::vector<uint8_t>& frozen = d_.parameters.frozen();
  if (frozen.empty()) return ok_status();
  // States that do not say have flags that the caller has set before.
  if (restored_.step && restored_.flags != frozen) return set_momentum_aside({}, frozen, {});
  restored_ = {};
  return set_momentum_aside({}, frozen, s.values<float>("frozen_m"));
}

Status OneBitAlgorithm::restore_stage(const std::vector<uint8_t>& valid) {
  std::vector<float> den;
  const StateArray to = d_.arrays["den"], from = d_.arrays["v"];
  const auto write_den = [&](const TensorRun& run) -> Status {
    den.resize(run.count);
    SOTTO_TRY(read_state(d_.access, from, run, den.data()));
    const auto eps = static_cast<float>(d_.groups[d_.parameters[run.tensor].group].eps);
    for (float& x : den) x = std::sqrt(x) + eps;
    return write_state(d_.access, to, run, den);
  };
  SOTTO_TRY(for_each_run(*d_.layout, false, write_den));
  return d_.compressed.set_counts(valid);
}

}  // namespace sotto
