#include "core/optim/algorithms/zeroone_adam.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/base/text.h"
#include "core/kernels/zeroone.h"
#include "core/optim/algorithms/adam.h"

namespace sotto {
namespace {

constexpr float kAny = std::numeric_limits<float>::lowest();

enum : uint8_t {
  kVariance,
  kGradient,  // averaged in one bit
  kGradientNewMask,
  kLocal,
  kFirstLocal,
  kSync,
  kFirstSync,
  kForcedSync,  // between steps, without a gradient
};
// What is exchanged.
enum : uint8_t { kAverages = 0, kGradientBits = 2, kNothing = 3, kSumBits = 4, kForcedSumBits = 5 };

constexpr StepVariant kForced{.number = kForcedSync, .traffic = kForcedSumBits, .update = false};

bool any_moved(std::span<const double> lr_sums) {
  return std::any_of(lr_sums.begin(), lr_sums.end(), [](double sum) { return sum > 0; });
}

ZeroOneCounters counters_of(const OptimSnapshot& s) {
  return {s.number("zeroone.var_interval"), s.number("zeroone.var_counter"),
          s.number("zeroone.local_interval"), s.number("zeroone.local_counter"),
          s.flag("zeroone.frozen")};
}

void put_counters(const ZeroOneCounters& c, OptimSnapshot* s) {
  s->set_number("zeroone.var_interval", c.var_interval);
  s->set_number("zeroone.var_counter", c.var_counter);
  s->set_number("zeroone.local_interval", c.local_interval);
  s->set_number("zeroone.local_counter", c.local_counter);
  s->set_flag("zeroone.frozen", c.frozen);
}

// Means over ranks of host memory, in rank order. Collective.
Status average(Comm& comm, std::span<std::vector<float>* const> arrays) {
  if (comm.size() == 1) return ok_status();
  Call call;
  CollectiveRequest& request = call.request;
  request.kind = OpKind::kAllReduce;
  request.reduce = ReduceOp::kMean;
  request.rank = comm.rank();
  request.size = comm.size();
  for (std::vector<float>* array : arrays) {
    request.counts.push_back(array->size());
    request.dtypes.push_back(Dtype::kF32);
    request.in_place.push_back(1);
    call.in.push_back(array->data());
    call.out.push_back(array->data());
  }
  return comm.run(std::move(call));
}

}  // namespace

ZeroOneAdam::ZeroOneAdam(OptimizerData& data)
    : OneBitAlgorithm(data),
      schedule_(data.groups[0].intervals),
      lr_sums_(data.groups.size(), 0.0),
      anchor_decays_(data.groups.size(), 1.0) {}

std::vector<StateArraySpec> ZeroOneAdam::arrays() const {
  std::vector<StateArraySpec> out{moment("m"), moment("v"), floats("den", false),
                                  floats("local_sum", true)};
  if (!d_.compat()) out.push_back(floats("anchor", true));
  return out;
}

// The callers' masks, from which every new mask starts.
Status ZeroOneAdam::allocated() {
  if (!d_.parameters.has_masks()) return ok_status();
  const uint64_t bytes = d_.arrays.bytes_of("valid");
  SOTTO_TRY(d_.arrays.add(d_.access, *d_.layout, {"base_valid", bytes}));
  SOTTO_ASSIGN(const std::vector<uint8_t> bits,
               d_.access.download<uint8_t>(d_.arrays.data("valid"), bytes));
  return d_.access.upload(d_.arrays.data("base_valid"), std::span<const uint8_t>(bits));
}

std::span<const std::string_view> ZeroOneAdam::settable() const {
  static constexpr std::string_view kNames[] = {"lr", "weight_decay", "beta1", "beta2", "eps"};
  return kNames;
}

// ---- steps ----

double ZeroOneAdam::next_anchor_decay(size_t group) const {
  return anchor_decays_[group] * (1 - d_.groups.lr(group) * d_.groups[group].weight_decay);
}

// With zero_variance_policy "error" every new mask is a place where compression starts.
StepVariant ZeroOneAdam::next() const {
  bool moved = false;
  for (size_t g = 0; g < d_.groups.size(); ++g) moved = moved || next_lr_sum(g) > 0;
  const bool first = !stage_started_;
  switch (schedule_.kind(d_.next_t(), moved)) {
    case ZeroOneUpdate::kVariance: break;
    case ZeroOneUpdate::kCompressed: {
      const bool renew = mask_is_old_ && !d_.compat();
      return {renew ? kGradientNewMask : kGradient, kGradientBits, renew};
    }
    case ZeroOneUpdate::kLocal: return {first ? kFirstLocal : kLocal, kNothing, first, true};
    case ZeroOneUpdate::kSync: return {first ? kFirstSync : kSync, kSumBits, first};
  }
  return {kVariance, kAverages};
}

std::optional<StepVariant> ZeroOneAdam::synchronisation() const {
  if (!schedule_.counters().frozen || !stage_started_ || !any_moved(lr_sums_)) return std::nullopt;
  return kForced;
}

// An element that the new mask lets in has no error, but the scale of those that were encoded would
// give it one: errors are kept as they are then, with scale 0.
Status ZeroOneAdam::start_stage() {
  SOTTO_TRY(OneBitAlgorithm::start_stage());
  if (!mask_is_old_ || d_.compat() || d_.alone() || !masks_zero_variance()) return ok_status();
  SOTTO_ASSIGN(const std::vector<uint8_t> valid, d_.valid_bits());
  SOTTO_ASSIGN(const bool grows, mask_grows(valid));
  if (!grows) return ok_status();
  SOTTO_ASSIGN(const ErrorFeedback errors, d_.compressed.residual(valid));
  return d_.compressed.restore(&errors);
}

Result<bool> ZeroOneAdam::mask_grows(const std::vector<uint8_t>& valid) const {
  bool grows = false;
  std::vector<float> v;
  const auto look = [&](const TensorRun& run) -> Status {
    if (grows || !d_.layout->compressed(run.tensor)) return ok_status();
    const uint8_t* mask = d_.parameters[run.tensor].mask;
    v.clear();
    return run.each_part([&](const Piece&, uint64_t flat, uint64_t at, uint64_t n) -> Status {
      for (uint64_t j = 0; j < n; ++j) {
        const uint64_t f = flat + j;
        const bool masked = mask != nullptr && mask[run.at + at + j] == 0;
        if (masked || ((valid[f / 8] >> (7 - f % 8)) & 1u) != 0) continue;
        if (v.empty()) {
          v.resize(run.count);
          SOTTO_TRY(read_state(d_.access, d_.arrays["v"], run, v.data()));
        }
        grows = grows || v[at + j] != 0;
      }
      return ok_status();
    });
  };
  SOTTO_TRY(for_each_run(*d_.layout, false, look));
  return grows;
}

StepPlan ZeroOneAdam::build(const StepVariant& variant, const StepShape& shape) const {
  if (variant.number == kVariance) {
    // Elements without variance get theirs: the callers' masks alone count.
    StepShape all = shape;
    if (!d_.compat()) all.valid = d_.arrays.has("base_valid") ? "base_valid" : "";
    return build_adam_step(all);
  }
  ZeroOneRequest r{shape, d_.codec->scale};
  if (variant.local) r.kind = ZeroOneUpdate::kLocal;
  if (variant.traffic == kSumBits) r.kind = ZeroOneUpdate::kSync;
  if (variant.number == kForcedSync) {
    r.kind = ZeroOneUpdate::kSync;
    r.shape.clip = 0;
    r.shape.loss_scaled = false;
    r.shape.gradients = Dtype::kF32;  // they are not read
    r.gradients = false;
    return build_zeroone_step(r);
  }
  r.refresh_mask = variant.begins_stage;
  r.begin = variant.begins_stage && r.kind != ZeroOneUpdate::kCompressed;
  r.mask_zero_variance = masks_zero_variance();
  r.own_masks = d_.arrays.has("base_valid");
  return build_zeroone_step(r);
}

void ZeroOneAdam::write_scalars(const StepVariant& variant, size_t group,
                                ScalarsRef scalars) const {
  Algorithm::write_scalars(variant, group, scalars);
  write_adam_scalars(d_.groups.params(group), d_.next_t(), scalars);
  if (auto* s = scalars.as<ZeroOneGroupScalars>()) {
    const bool forced = variant.number == kForcedSync;
    s->lr_sum = static_cast<float>(forced ? lr_sums_[group] : next_lr_sum(group));
    s->decay = static_cast<float>(forced ? anchor_decays_[group] : next_anchor_decay(group));
  }
  // As published, one rank leaves such a gradient out.
  if (d_.compat() && d_.alone() && variant.number == kGradient) {
    scalars->b1 = 1;
    scalars->one_minus_b1 = 0;
  }
}

void ZeroOneAdam::committed(const StepVariant& variant) {
  const bool frozen = schedule_.counters().frozen;
  const bool sync = variant.traffic >= kSumBits;
  for (size_t g = 0; g < d_.groups.size() && frozen; ++g) {
    lr_sums_[g] = sync ? 0.0 : next_lr_sum(g);
    anchor_decays_[g] = sync ? 1.0 : next_anchor_decay(g);
  }
  if (sync || variant.traffic == kGradientBits) d_.compressed.flip();
  local_steps_ = variant.local || (local_steps_ && !sync);
  if (!variant.update) return;
  mask_is_old_ = variant.number == kVariance;
  stage_started_ = frozen;
  schedule_.advance(d_.next_t());
}

// ---- reports ----

std::string_view ZeroOneAdam::stage() const { return late() ? "local steps" : "variance updates"; }

void ZeroOneAdam::report_settings(nlohmann::ordered_json* report) const {
  const ZeroOneCounters& c = schedule_.counters();
  (*report)["var_freeze_step"] = d_.groups[0].intervals.var_freeze_step;
  (*report)["var_interval"] = c.var_interval;
  (*report)["local_interval"] = c.local_interval;
}

// ---- state ----

Status ZeroOneAdam::describe(StateErrors errors, OptimSnapshot* s) {
  SOTTO_TRY(OneBitAlgorithm::describe(errors, s));
  put_counters(schedule_.counters(), s);
  const bool averaged = errors != StateErrors::kOwn && differs();
  s->put("lr_sums", averaged ? std::vector<double>(d_.groups.size(), 0.0) : lr_sums_);
  s->put("anchor_decays", averaged ? std::vector<double>(d_.groups.size(), 1.0) : anchor_decays_);
  const uint64_t bytes = stage_started_ ? d_.layout->elements() * 4 : 0;
  s->put_outside("local_sum", bytes);
  s->put_outside("anchor", d_.compat() ? 0 : bytes);
  return ok_status();
}

struct ZeroOneAdam::CommonRun {
  std::vector<float> params, m, anchor, sums, v;
};

// What a synchronisation makes of a run, with a mean in full precision in place of the compressed
// one, so that error feedback has no part in it.
Status ZeroOneAdam::common_run(const TensorRun& run, const std::vector<uint8_t>& valid,
                               CommonRun* out) const {
  const ParamSpec& p = d_.parameters[run.tensor];
  ZeroOneGroupScalars group;
  write_scalars(kForced, p.group, ScalarsRef(kScalarsType<ZeroOneGroupScalars>, &group));
  CommonRun& o = *out;
  for (std::vector<float>* array : {&o.params, &o.m, &o.anchor, &o.sums, &o.v})
    array->assign(run.count, 0.0f);
  const auto read_flat = [&](std::string_view array, std::vector<float>* values) {
    return read_state(d_.access, d_.arrays[array], run, values->data());
  };
  SOTTO_TRY(d_.access.copy_and_wait(o.params.data(), p.param + run.at, run.count * sizeof(float)));
  SOTTO_TRY(read_flat("m", &o.m));
  SOTTO_TRY(read_flat("v", &o.v));
  SOTTO_TRY(read_flat("local_sum", &o.sums));
  if (!d_.compat()) SOTTO_TRY(read_flat("anchor", &o.anchor));
  // A synchronisation leaves frozen parameters as they are, on all ranks.
  if (d_.parameters.frozen(run.tensor)) {
    read_aside(run, o.m.data());
    return ok_status();
  }
  std::vector<float> den(run.count);
  for (uint64_t i = 0; i < run.count; ++i) {
    den[i] = std::sqrt(o.v[i]) + static_cast<float>(d_.groups[p.group].eps);
    if (!d_.compat()) continue;
    o.params[i] -= o.sums[i];  // replicas differ in it by rounding alone
    o.sums[i] *= den[i];
  }
  // A group whose rate was 0 keeps its momentum.
  std::vector<float>* averaged[] = {&o.sums, d_.compat() ? &o.params : &o.m, &o.m};
  const bool with_m = group.lr_sum == 0;
  SOTTO_TRY(
      average(*d_.comm, std::span(averaged).first(1u + (d_.compat() ? 1 : 0) + (with_m ? 1 : 0))));
  return run.each_part([&](const Piece&, uint64_t flat, uint64_t at, uint64_t n) {
    for (uint64_t i = at; i < at + n; ++i) {
      const uint64_t f = flat + (i - at);
      if (d_.compat()) {
        const bool masked = !d_.alone() && p.mask != nullptr && p.mask[run.at + i] == 0;
        float none = 0;
        zeroone_in_place_sync_element(group, masked ? 0.0f : o.sums[i], &o.m[i], &none, den[i],
                                      &o.params[i]);
      } else {
        const bool masked = !valid.empty() && ((valid[f / 8] >> (7 - f % 8)) & 1u) == 0;
        zeroone_sync_element(group, masked, o.sums[i], &o.m[i], &o.sums[i], den[i], &o.anchor[i],
                             &o.params[i]);
      }
    }
    return ok_status();
  });
}

// What any ranks may load: the state after a synchronisation, which the optimizer does not make.
std::optional<Status> ZeroOneAdam::stream(std::string_view array, StateErrors errors,
                                          const FloatSink& sink) {
  std::vector<float> CommonRun::*values = nullptr;
  if (array == kParamsArray) values = &CommonRun::params;
  if (array == "m") values = &CommonRun::m;
  if (array == "anchor") values = &CommonRun::anchor;
  if (array == "local_sum") values = &CommonRun::sums;
  if (errors == StateErrors::kOwn || !differs() || values == nullptr)
    return OneBitAlgorithm::stream(array, errors, sink);
  const auto all = [&]() -> Status {
    SOTTO_ASSIGN(const std::vector<uint8_t> valid, d_.valid_bits());
    CommonRun common;
    return for_each_run(*d_.layout, false, [&](const TensorRun& run) -> Status {
      SOTTO_TRY(common_run(run, valid, &common));
      if (array == "local_sum") std::fill(common.sums.begin(), common.sums.end(), 0.0f);
      return sink(common.*values);
    });
  };
  return all();
}

Status ZeroOneAdam::check(const OptimSnapshot& s, StateErrors errors) const {
  SOTTO_TRY(OneBitAlgorithm::check(s, errors));
  ZeroOneSchedule schedule(d_.groups[0].intervals);
  SOTTO_TRY(schedule.restore(counters_of(s), s.step, d_.state_step(s.step)));
  SOTTO_TRY(check_values("learning-rate sums, one per parameter group", s.bytes("lr_sums"),
                         d_.groups.size(), sizeof(double)));
  SOTTO_TRY(check_values("anchor decays, one per parameter group", s.bytes("anchor_decays"),
                         d_.groups.size(), sizeof(double)));
  if (!s.flag("stage_started")) return ok_status();
  const uint64_t n = d_.layout->elements();
  SOTTO_TRY(check_values("the anchor", s.bytes("anchor"), d_.compat() ? 0 : n));
  SOTTO_TRY(check_values("local updates", s.bytes("local_sum"), n));
  if (errors == StateErrors::kOwn || s.one_for_all || !any_moved(s.values<double>("lr_sums")))
    return ok_status();
  return invalid_argument(
      "the state holds local updates of one rank since the last synchronisation; import it in mode "
      "exact on that rank, or export it in another mode, which synchronises first");
}

Status ZeroOneAdam::restore(const OptimSnapshot& s) {
  SOTTO_TRY(OneBitAlgorithm::restore(s));
  ZeroOneCounters counters = counters_of(s);
  counters.frozen = late_stage(s.step);
  SOTTO_TRY(schedule_.restore(counters, s.step, d_.state_step(s.step)));
  const std::vector<double> none(d_.groups.size(), 0.0), whole(d_.groups.size(), 1.0);
  lr_sums_ = stage_started_ ? s.copy_of<double>("lr_sums") : none;
  anchor_decays_ = stage_started_ ? s.copy_of<double>("anchor_decays") : whole;
  local_steps_ = true;  // there may have been
  mask_is_old_ = true;
  return ok_status();
}

// Between synchronisations ranks have but variance and anchor alike, also where learning rates were
// 0; in mode compat replicas keep what rounding makes of them.
std::vector<std::string_view> ZeroOneAdam::common_arrays(const OptimSnapshot& s) const {
  if (says_late(s)) return {"v", "anchor"};
  return OneBitAlgorithm::common_arrays(s);
}

// ---- DeepSpeed checkpoints ----

std::span<const ArrayKey> ZeroOneAdam::array_keys() const {
  using Shape = ArrayKey::Shape;
  static constexpr ArrayKey kKeys[] = {
      {"momentum_accumulator", Shape::kElements, "local_sum"},
      {"var_interval", Shape::kNumber, {}},
      {"var_counter", Shape::kNumber, {}},
      {"local_step_interval", Shape::kNumber, {}},
      {"local_step_counter", Shape::kNumber, {}},
      {"lrs", Shape::kNumber, {}},
  };
  return kKeys;
}

Status ZeroOneAdam::read_arrays(const ArrayReader& reader, OptimSnapshot* s) const {
  SOTTO_TRY(reader.need(std::array<std::string_view, 4>{
      "var_interval", "var_counter", "local_step_interval", "local_step_counter"}));
  const auto counter = [&](std::string_view word, int64_t least, uint64_t* out) -> Status {
    SOTTO_ASSIGN(const auto value, reader.common_integer(word, least));
    *out = static_cast<uint64_t>(value.value_or(least));
    return ok_status();
  };
  ZeroOneCounters counters;
  counters.frozen = late_stage(s->step);
  SOTTO_TRY(counter("var_interval", 1, &counters.var_interval));
  SOTTO_TRY(counter("var_counter", 0, &counters.var_counter));
  SOTTO_TRY(counter("local_step_interval", 1, &counters.local_interval));
  SOTTO_TRY(counter("local_step_counter", 0, &counters.local_counter));
  ZeroOneSchedule schedule(d_.groups[0].intervals);
  SOTTO_TRY(schedule.restore(counters, s->step, s->step + s->step_offset)
                .with_prefix(
                    "arrays var_interval, var_counter, local_step_interval, local_step_counter"));
  put_counters(counters, s);
  std::vector<double> lr_sums(d_.groups.size(), 0.0);
  const bool between = reader.has("lrs") || reader.has("momentum_accumulator");
  if (!counters.frozen || !between) {
    s->put("lr_sums", lr_sums);
    s->put("anchor_decays", std::vector<double>(d_.groups.size(), 1.0));
    return ok_status();
  }
  SOTTO_TRY(reader.need(std::array<std::string_view, 2>{"lrs", "momentum_accumulator"}));
  SOTTO_ASSIGN(const auto sums, reader.common_numbers("lrs", 0, d_.groups.size()));
  for (size_t g = 0; g < d_.groups.size(); ++g) lr_sums[g] = sums[g].value_or(0);
  return read_local_sum(reader, lr_sums, s);
}

// Between synchronisations a checkpoint has rank 0's parameters and what its local updates since
// the last one have added to them (momentum_accumulator), weight decay included. In mode compat
// that is what is kept here, else the anchor, what it has decayed to, and the sum of learning rate
// times momentum.
Status ZeroOneAdam::read_local_sum(const ArrayReader& reader, const std::vector<double>& lr_sums,
                                   OptimSnapshot* s) const {
  SOTTO_ASSIGN(const std::vector<float> added, reader.elements("momentum_accumulator", kAny));
  std::vector<double> decays;
  for (size_t g = 0; g < d_.groups.size(); ++g)
    decays.push_back(std::exp(-d_.groups[g].weight_decay * lr_sums[g]));
  const std::span<const float> params = s->values<float>(kParamsArray), v = s->values<float>("v");
  std::vector<float> anchor = s->floats(kParamsArray);
  std::vector<float> local_sum(params.size(), 0.0f);
  uint64_t first = 0;
  for (uint64_t t = 0; t < d_.parameters.size(); ++t) {
    const ParamSpec& p = d_.parameters[t];
    const double decay = decays[p.group];
    for (uint64_t i = first; i < first + p.count; ++i) {
      if (lr_sums[p.group] == 0 && added[i] != 0) {
        return invalid_argument(
            "array \"{}\" is not 0 (element {} of \"{}\" is {}), but \"{}\" is 0: there have been "
            "no local updates",
            printable(reader.name_of("momentum_accumulator", t), 300), i - first, p.name, added[i],
            printable(reader.name_of("lrs", t), 300));
      }
      if (d_.compat()) {
        local_sum[i] = added[i];
        continue;
      }
      const bool masked =
          (p.mask != nullptr && p.mask[i - first] == 0) || (v[i] == 0 && masks_zero_variance());
      if (masked) {
        anchor[i] = static_cast<float>(params[i] / decay);
        continue;
      }
      const float den = std::sqrt(v[i]) + static_cast<float>(d_.groups[p.group].eps);
      anchor[i] = params[i] - added[i];
      local_sum[i] = static_cast<float>((params[i] - decay * anchor[i]) * den);
    }
    first += p.count;
  }
  s->set_flag("stage_started", any_moved(lr_sums));
  s->one_for_all = true;
  s->put("lr_sums", lr_sums);
  s->put("anchor_decays", decays);
  s->put("local_sum", local_sum);
  if (!d_.compat()) s->put("anchor", anchor);
  return ok_status();
}

std::unique_ptr<Algorithm> make_zeroone_adam(OptimizerData& data) {
  return std::make_unique<ZeroOneAdam>(data);
}

}  // namespace sotto
