#include "core/optim/algorithms/zeroone_adam.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/base/text.h"
#include "core/kernels/elements.h"
#include "core/optim/algorithms/adam.h"
#include "core/optim/named_arrays.h"

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

bool any_moved(const std::vector<double>& lr_sums) {
  return std::any_of(lr_sums.begin(), lr_sums.end(), [](double sum) { return sum > 0; });
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
      schedule_(data.groups[0]),
      lr_sums_(data.groups.size(), 0.0),
      anchor_decays_(data.groups.size(), 1.0) {}

std::vector<StateArraySpec> ZeroOneAdam::arrays() const {
  std::vector<StateArraySpec> out{moment("m"), moment("v"), floats("den"), floats("local_sum")};
  if (!d_.compat()) out.push_back(floats("anchor"));
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
  return StepVariant{.number = kForcedSync, .traffic = kForcedSumBits, .update = false};
}

StepPlan ZeroOneAdam::build(const StepVariant& variant, const StepShape& shape) const {
  if (variant.number == kVariance) return build_adam_step(shape);
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

void ZeroOneAdam::write_scalars(const StepVariant& variant, size_t group, GroupScalars* s) const {
  const bool forced = variant.number == kForcedSync;
  s->lr_sum = static_cast<float>(forced ? lr_sums_[group] : next_lr_sum(group));
  s->anchor_decay = static_cast<float>(forced ? anchor_decays_[group] : next_anchor_decay(group));
  // As published, one rank leaves such a gradient out.
  if (d_.compat() && d_.alone() && variant.number == kGradient) {
    s->b1 = 1;
    s->one_minus_b1 = 0;
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
  if (!variant.update) return;
  mask_is_old_ = variant.number == kVariance;
  stage_started_ = frozen;
  schedule_.advance(d_.next_t());
}

// ---- reports ----

std::string_view ZeroOneAdam::stage() const { return late() ? "local steps" : "variance updates"; }

void ZeroOneAdam::report_settings(nlohmann::ordered_json* report) const {
  const ZeroOneCounters& c = schedule_.counters();
  (*report)["var_freeze_step"] = d_.groups[0].var_freeze_step;
  (*report)["var_interval"] = c.var_interval;
  (*report)["local_interval"] = c.local_interval;
}

// ---- state ----

Status ZeroOneAdam::describe(StateErrors errors, OptimSnapshot* s) {
  s->zeroone = schedule_.counters();
  const bool averaged = errors != StateErrors::kOwn && synchronisation();
  s->lr_sums = averaged ? std::vector<double>(d_.groups.size(), 0.0) : lr_sums_;
  s->anchor_decays = averaged ? std::vector<double>(d_.groups.size(), 1.0) : anchor_decays_;
  if (stage_started_) {
    const uint64_t n = d_.layout->elements();
    s->outside[static_cast<size_t>(StatePart::kLocalSum)] = n;
    if (!d_.compat()) s->outside[static_cast<size_t>(StatePart::kAnchor)] = n;
  }
  return OneBitAlgorithm::describe(errors, s);
}

struct ZeroOneAdam::CommonRun {
  std::vector<float> params, m, anchor, sums, v;
};

// What a synchronisation makes of a run, with a mean in full precision in place of the compressed
// one, so that error feedback has no part in it.
Status ZeroOneAdam::common_run(const TensorRun& run, const std::vector<uint8_t>& valid,
                               CommonRun* out) const {
  const ParamSpec& p = d_.parameters[run.tensor];
  const GroupScalars group = scalars(*synchronisation(), p.group);
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
std::optional<Status> ZeroOneAdam::stream(StatePart part, StateErrors errors,
                                          const FloatSink& sink) {
  std::vector<float> CommonRun::*values = nullptr;
  if (part == StatePart::kParams) values = &CommonRun::params;
  if (part == StatePart::kM) values = &CommonRun::m;
  if (part == StatePart::kAnchor) values = &CommonRun::anchor;
  if (part == StatePart::kLocalSum) values = &CommonRun::sums;
  if (errors == StateErrors::kOwn || !synchronisation() || values == nullptr)
    return OneBitAlgorithm::stream(part, errors, sink);
  const auto all = [&]() -> Status {
    SOTTO_ASSIGN(const std::vector<uint8_t> valid, d_.valid_bits());
    CommonRun common;
    return for_each_run(*d_.layout, false, [&](const TensorRun& run) -> Status {
      SOTTO_TRY(common_run(run, valid, &common));
      if (part == StatePart::kLocalSum) std::fill(common.sums.begin(), common.sums.end(), 0.0f);
      return sink(common.*values);
    });
  };
  return all();
}

Status ZeroOneAdam::check(const OptimSnapshot& s, StateErrors errors) const {
  SOTTO_TRY(OneBitAlgorithm::check(s, errors));
  ZeroOneSchedule schedule(d_.groups[0]);
  SOTTO_TRY(schedule.restore(s.zeroone, s.step, d_.state_step(s.step)));
  SOTTO_TRY(check_size("learning-rate sums, one per parameter group", s.lr_sums.size(),
                       d_.groups.size()));
  SOTTO_TRY(check_size("anchor decays, one per parameter group", s.anchor_decays.size(),
                       d_.groups.size()));
  if (!s.stage_started) return ok_status();
  const uint64_t n = d_.layout->elements();
  SOTTO_TRY(check_size("the anchor", s.values(StatePart::kAnchor), d_.compat() ? 0 : n));
  SOTTO_TRY(check_size("local updates", s.values(StatePart::kLocalSum), n));
  if (errors == StateErrors::kOwn || s.local_sum_is_common || !any_moved(s.lr_sums))
    return ok_status();
  return invalid_argument(
      "the state holds local updates of one rank since the last synchronisation; import it in mode "
      "exact on that rank, or export it in another mode, which synchronises first");
}

Status ZeroOneAdam::restore(const OptimSnapshot& s) {
  SOTTO_TRY(OneBitAlgorithm::restore(s));
  ZeroOneCounters counters = s.zeroone;
  counters.frozen = late_stage(s.step);
  SOTTO_TRY(schedule_.restore(counters, s.step, d_.state_step(s.step)));
  const std::vector<double> none(d_.groups.size(), 0.0), whole(d_.groups.size(), 1.0);
  lr_sums_ = stage_started_ ? s.lr_sums : none;
  anchor_decays_ = stage_started_ ? s.anchor_decays : whole;
  mask_is_old_ = true;
  return ok_status();
}

// Between synchronisations ranks have but variance and anchor alike; in mode compat replicas keep
// what rounding makes of them.
std::vector<StatePart> ZeroOneAdam::common_parts(const OptimSnapshot& s) const {
  if (s.zeroone.frozen && (any_moved(s.lr_sums) || d_.compat()))
    return {StatePart::kV, StatePart::kAnchor};
  return OneBitAlgorithm::common_parts(s);
}

// ---- DeepSpeed checkpoints ----

Status ZeroOneAdam::read_arrays(const ArrayReader& reader, OptimSnapshot* s) const {
  s->zeroone.frozen = late_stage(s->step);
  SOTTO_TRY(reader.need(std::array{ArrayKey::kVarInterval, ArrayKey::kVarCounter,
                                   ArrayKey::kLocalStepInterval, ArrayKey::kLocalStepCounter}));
  const auto counter = [&](ArrayKey key, int64_t least, uint64_t* out) -> Status {
    SOTTO_ASSIGN(const auto value, reader.common_integer(key, least));
    *out = static_cast<uint64_t>(value.value_or(least));
    return ok_status();
  };
  SOTTO_TRY(counter(ArrayKey::kVarInterval, 1, &s->zeroone.var_interval));
  SOTTO_TRY(counter(ArrayKey::kVarCounter, 0, &s->zeroone.var_counter));
  SOTTO_TRY(counter(ArrayKey::kLocalStepInterval, 1, &s->zeroone.local_interval));
  SOTTO_TRY(counter(ArrayKey::kLocalStepCounter, 0, &s->zeroone.local_counter));
  ZeroOneSchedule schedule(d_.groups[0]);
  SOTTO_TRY(schedule.restore(s->zeroone, s->step, s->step + s->step_offset)
                .with_prefix(
                    "arrays var_interval, var_counter, local_step_interval, local_step_counter"));
  s->lr_sums.assign(d_.groups.size(), 0.0);
  s->anchor_decays.assign(d_.groups.size(), 1.0);
  const bool between = reader.has(ArrayKey::kLrs) || reader.has(ArrayKey::kMomentumAccumulator);
  if (!s->zeroone.frozen || !between) return ok_status();
  SOTTO_TRY(reader.need(std::array{ArrayKey::kLrs, ArrayKey::kMomentumAccumulator}));
  SOTTO_ASSIGN(const auto sums, reader.common_numbers(ArrayKey::kLrs, 0, d_.groups.size()));
  for (size_t g = 0; g < d_.groups.size(); ++g) s->lr_sums[g] = sums[g].value_or(0);
  return read_local_sum(reader, s);
}

// Between synchronisations a checkpoint has rank 0's parameters and what its local updates since
// the last one have added to them (momentum_accumulator), weight decay included. In mode compat
// that is what is kept here, else the anchor, what it has decayed to, and the sum of learning rate
// times momentum.
Status ZeroOneAdam::read_local_sum(const ArrayReader& reader, OptimSnapshot* s) const {
  SOTTO_ASSIGN(const std::vector<float> added,
               reader.elements(ArrayKey::kMomentumAccumulator, kAny));
  for (size_t g = 0; g < d_.groups.size(); ++g)
    s->anchor_decays[g] = std::exp(-d_.groups[g].weight_decay * s->lr_sums[g]);
  if (!d_.compat()) s->anchor = s->params;
  s->local_sum.assign(s->params.size(), 0.0f);
  uint64_t first = 0;
  for (uint64_t t = 0; t < d_.parameters.size(); ++t) {
    const ParamSpec& p = d_.parameters[t];
    const double decay = s->anchor_decays[p.group];
    for (uint64_t i = first; i < first + p.count; ++i) {
      if (s->lr_sums[p.group] == 0 && added[i] != 0) {
        return invalid_argument(
            "array \"{}\" is not 0 (element {} of \"{}\" is {}), but \"{}\" is 0: there have been "
            "no local updates",
            printable(reader.name_of(ArrayKey::kMomentumAccumulator, t), 300), i - first, p.name,
            added[i], printable(reader.name_of(ArrayKey::kLrs, t), 300));
      }
      if (d_.compat()) {
        s->local_sum[i] = added[i];
        continue;
      }
      const bool masked =
          (p.mask != nullptr && p.mask[i - first] == 0) || (s->v[i] == 0 && masks_zero_variance());
      if (masked) {
        s->anchor[i] = static_cast<float>(s->params[i] / decay);
        continue;
      }
      const float den = std::sqrt(s->v[i]) + static_cast<float>(d_.groups[p.group].eps);
      s->anchor[i] = s->params[i] - added[i];
      s->local_sum[i] = static_cast<float>((s->params[i] - decay * s->anchor[i]) * den);
    }
    first += p.count;
  }
  s->stage_started = any_moved(s->lr_sums);
  s->local_sum_is_common = true;
  return ok_status();
}

}  // namespace sotto
