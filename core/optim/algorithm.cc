#include "core/optim/algorithm.h"

#include <algorithm>
#include <cmath>

#include "core/base/text.h"

namespace sotto {
namespace {

struct Row {
  OptimizerKind kind;
  std::unique_ptr<Algorithm> (*make)(OptimizerData&);
};
constexpr Row kRows[] = {
#define SOTTO_OPTIMIZER(type, number, name, algorithm, ...) \
  {OptimizerKind::k##type, make_##algorithm},
#include "core/config/optimizers.def"
};

Status no_error_feedback() {
  return invalid_argument(
      "the state has no error feedback (it was exported in mode reset, by an optimizer whose codec "
      "has none, or by one rank alone); import it in mode reset");
}

}  // namespace

std::unique_ptr<Algorithm> Algorithm::make(OptimizerData& data) {
  for (const Row& row : kRows) {
    if (row.kind == data.config.optimizer.kind) return row.make(data);
  }
  return nullptr;
}

void Algorithm::write_scalars(const StepVariant&, size_t group, ScalarsRef s) const {
  const OptimizerParams p = d_.groups.params(group);
  s->lr = d_.groups.lr(group);
  s->b1 = static_cast<float>(p.beta1);
  s->one_minus_b1 = static_cast<float>(1.0 - p.beta1);
  s->b2 = static_cast<float>(p.beta2);
  s->one_minus_b2 = static_cast<float>(1.0 - p.beta2);
  s->eps = static_cast<float>(p.eps);
  s->weight_decay = static_cast<float>(p.weight_decay);
}

void Algorithm::write_padding_scalars(ScalarsRef s) const {
  s->b1 = 0;
  s->one_minus_b1 = 1;
}

void Algorithm::committed(const StepVariant&) {
  if (d_.codec) d_.compressed.flip();
}

Status Algorithm::accepts(const OptimSnapshot& s, StateErrors errors) const {
  const std::string_view mine = optimizer_kind_name(d_.config.optimizer.kind);
  if (s.algorithm != mine) {
    return invalid_argument("the state is of optimizer \"{}\", this one is \"{}\"",
                            printable(s.algorithm), mine);
  }
  if (const std::string_view mode = mode_name(d_.mode()); s.mode != mode) {
    return invalid_argument("the state was made in sotto.mode \"{}\", this optimizer is in \"{}\"",
                            printable(s.mode), mode);
  }
  if (s.names.size() != s.counts.size()) {
    return invalid_argument("the state's description has {}, its counts are of {}",
                            counted(s.names.size(), "parameter"), s.counts.size());
  }
  for (size_t i = 0; i < std::max(s.names.size(), d_.parameters.size()); ++i) {
    const bool found = i < s.names.size(), wanted = i < d_.parameters.size();
    if (found && wanted && s.names[i] == d_.parameters[i].name &&
        s.counts[i] == d_.parameters[i].count)
      continue;
    const auto text_of = [](std::string_view name, uint64_t count) {
      return fmt::format("\"{}\" with {}", printable(name), counted(count, "element"));
    };
    return invalid_argument(
        "parameter {} of the state is {}, of this optimizer {}; they have {} and {}", i,
        found ? text_of(s.names[i], s.counts[i]) : "not there",
        wanted ? text_of(d_.parameters[i].name, d_.parameters[i].count) : "not there",
        s.names.size(), counted(d_.parameters.size(), "parameter"));
  }
  const uint64_t n = d_.layout->elements();
  SOTTO_TRY(check_values("parameters", s.bytes(kParamsArray), n));
  SOTTO_TRY(check_values("m", s.bytes("m"), d_.arrays.has("m") ? n : 0));
  SOTTO_TRY(check_values("v", s.bytes("v"), d_.arrays.has("v") ? n : 0));
  if (!std::isfinite(s.loss_scale.scale) || s.loss_scale.scale <= 0)
    return invalid_argument("the state's loss scale is {}", s.loss_scale.scale);
  constexpr int64_t kMost = int64_t{1} << 53;
  if (s.loss_scale.iteration > static_cast<uint64_t>(kMost) || s.loss_scale.last_overflow < -1 ||
      s.loss_scale.last_overflow >= static_cast<int64_t>(s.loss_scale.iteration)) {
    return invalid_argument(
        "the state's loss scaler has counted {} attempts, the last overflow was attempt {}",
        s.loss_scale.iteration, s.loss_scale.last_overflow);
  }
  if (s.scheduler_iteration < -1 || s.scheduler_iteration > kMost)
    return invalid_argument("the state's scheduler iteration is {}", s.scheduler_iteration);
  SOTTO_TRY(check(s, errors));
  if (errors == StateErrors::kMean && d_.keeps_errors()) {
    if (!s.mean && s.residual) {
      return invalid_argument(
          "the state has the error feedback of one rank alone (it was exported in mode exact on "
          "rank {0} of {1}); import it in mode exact on that rank of {1}, or in mode reset, where "
          "error feedback starts at zero; for another number of ranks have the {2} export it "
          "in mode mean",
          s.residual->rank, s.residual->size, counted(s.residual->size, "rank"));
    }
    if (!s.mean) {
      return no_error_feedback();
    }
    SOTTO_TRY(check_values("mean worker errors", s.bytes(kMeanWorkerError), n));
    SOTTO_TRY(check_values("server errors", s.bytes(kMeanServerError), n));
  }
  if (!d_.codec || errors != StateErrors::kOwn || d_.alone()) return ok_status();
  if (!s.residual && s.mean) {
    return invalid_argument(
        "the state has the mean of the error feedback of all ranks (it was exported in mode mean); "
        "import it in mode mean, or in mode reset");
  }
  if (!s.residual) {
    return no_error_feedback();
  }
  return d_.compressed.check_settings(*s.residual, s.bytes(kWorkerError) / sizeof(float),
                                      s.bytes(kServerError) / sizeof(float));
}

Status Algorithm::restore(const OptimSnapshot&) {
  const std::vector<TensorState> states(d_.parameters.size());
  SOTTO_TRY(
      d_.access.upload(d_.arrays.data("tensor_states"), std::span<const TensorState>(states)));
  return d_.write_valid_bits(false);
}

std::vector<std::string_view> Algorithm::common_arrays(const OptimSnapshot&) const {
  return {"v", "m", kParamsArray};
}

StateArraySpec Algorithm::floats(std::string_view name, bool exported) const {
  return {name, d_.layout->flat_elements() * 4, exported};
}

StateArraySpec Algorithm::moment(std::string_view name) const {
  const StateType type = d_.moment_type();
  return {name, state_element_bytes(*d_.layout, type), true, type, name == "v"};
}

}  // namespace sotto
