// From the arrays of a DeepSpeed checkpoint to a snapshot (specification section 12).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core/base/hash.h"
#include "core/base/text.h"
#include "core/optim/named_arrays.h"
#include "core/optim/optimizer.h"

namespace sotto {
namespace {

constexpr float kAny = std::numeric_limits<float>::lowest();
constexpr double kPositive = std::numeric_limits<float>::min();

// What ranks compare: hashes of the parts of a snapshot that have to be the same.
constexpr std::string_view kParts[] = {"step, scheduler or loss scaler",
                                       "parameters",
                                       "exp_avg",
                                       "exp_avg_sq",
                                       "exp_avg_sq_fresh",
                                       "per-parameter coefficients",
                                       "schedule",
                                       "momentum_accumulator"};
using PartHashes = std::array<uint64_t, std::size(kParts)>;

template <class T>
uint64_t hash_of(const std::vector<T>& values) {
  return hash64(values.data(), values.size() * sizeof(T));
}

PartHashes hashes_of(const OptimSnapshot& s) {
  const std::vector<double> counters{
      static_cast<double>(s.step), static_cast<double>(s.scheduler_iteration), s.loss_scale.scale,
      static_cast<double>(s.loss_scale.iteration), static_cast<double>(s.loss_scale.last_overflow)};
  std::vector<double> schedule{
      static_cast<double>(s.zeroone.var_interval), static_cast<double>(s.zeroone.var_counter),
      static_cast<double>(s.zeroone.local_interval), static_cast<double>(s.zeroone.local_counter)};
  schedule.insert(schedule.end(), s.lr_sums.begin(), s.lr_sums.end());
  return {hash_of(counters), hash_of(s.params),        hash_of(s.m),      hash_of(s.v),
          hash_of(s.vf),     hash_of(s.tensor_states), hash_of(schedule), hash_of(s.local_sum)};
}

// What a rank tells the others: whether it takes its arrays, else the beginning of its error.
struct ImportWord {
  uint64_t taken = 0;
  PartHashes parts = {};
  char text[256] = {};
};

}  // namespace

Status Optimizer::import_arrays(const Result<std::vector<NamedArray>>& arrays) {
  const auto read = [&]() -> Result<OptimSnapshot> {
    if (busy()) return error(Code::kBusy, "a step of this optimizer is in flight");
    if (!arrays.ok()) return arrays.status();
    SOTTO_ASSIGN(OptimSnapshot s, read_arrays(*arrays));
    SOTTO_TRY(check_snapshot(s, StateErrors::kNone));
    return s;
  };
  const Result<OptimSnapshot> snapshot = read();
  // All ranks take part in the comparison, also one that refuses its arrays.
  SOTTO_TRY(compare_import(snapshot));
  return restore(*snapshot, false);
}

Status Optimizer::compare_import(const Result<OptimSnapshot>& mine) const {
  ImportWord word;
  word.taken = mine.ok() ? 1 : 0;
  if (mine.ok()) {
    word.parts = hashes_of(*mine);
  } else {
    const std::string& text = mine.status().text();
    std::memcpy(word.text, text.data(), std::min(text.size(), sizeof word.text));
  }
  const Result<std::vector<std::string>> all = comm_->exchange(
      std::string(reinterpret_cast<const char*>(&word), sizeof word), OpKind::kOptimImport);
  SOTTO_TRY(mine.status());
  SOTTO_TRY(all.status());
  for (size_t r = 0; r < all->size(); ++r) {
    ImportWord other;
    std::memcpy(&other, (*all)[r].data(), sizeof other);
    if (other.taken == 0) {
      return error(Code::kProtocol, "rank {} refuses its arrays, nothing is imported: {}", r,
                   printable(std::string_view(other.text, strnlen(other.text, sizeof other.text)),
                             sizeof other.text));
    }
    for (size_t i = 0; i < word.parts.size(); ++i) {
      if (other.parts[i] == word.parts[i]) continue;
      return error(Code::kProtocol,
                   "ranks {} and {} import different values ({}); every rank has to give the same "
                   "arrays; nothing is imported",
                   r, comm_->rank(), kParts[i]);
    }
  }
  return ok_status();
}

// Everything but what only one of the 1-bit types has is read here.
Result<OptimSnapshot> Optimizer::read_arrays(std::span<const NamedArray> arrays) const {
  if (kind() == OptimizerKind::kSgd) {
    return unsupported(
        "SGD has no arrays to import; allowed: Adam, AdamW, Lamb and the 1-bit types");
  }
  ArrayReader reader(access_, params_, kind());
  SOTTO_TRY(reader.take(arrays));
  SOTTO_TRY(reader.need(std::array{ArrayKey::kStep}));
  OptimSnapshot s;
  s.algorithm = std::string(optimizer_kind_name(kind()));
  s.mode = std::string(mode_name(compat() ? Mode::kCompat : Mode::kStrict));
  s.step_offset = onebit() ? config_.sotto.step_offset : 0;
  SOTTO_ASSIGN(const auto t, reader.common_integer(ArrayKey::kStep, s.step_offset));
  s.step = static_cast<uint64_t>(t.value_or(s.step_offset)) - s.step_offset;
  s.compressed = !zeroone() && late_stage(s.step);
  s.zeroone.frozen = zeroone() && late_stage(s.step);

  std::vector<ArrayKey> needed{ArrayKey::kExpAvg, ArrayKey::kExpAvgSq};
  if (reader.has(ArrayKey::kFp32)) needed.push_back(ArrayKey::kFp32);
  if (config_.scheduler.kind != SchedulerKind::kNone)
    needed.push_back(ArrayKey::kLastBatchIteration);
  if (loss_scaler_.dynamic()) {
    needed.insert(needed.end(),
                  {ArrayKey::kCurScale, ArrayKey::kCurIter, ArrayKey::kLastOverflowIter});
  }
  SOTTO_TRY(reader.need(needed));

  for (const ParamSpec& p : params_) {
    s.names.push_back(p.name);
    s.counts.push_back(p.count);
  }
  if (reader.has(ArrayKey::kFp32)) {
    SOTTO_ASSIGN(s.params, reader.elements(ArrayKey::kFp32, kAny));
  } else {
    for (const ParamSpec& p : params_) {
      SOTTO_ASSIGN(const std::vector<float> kept, access_.download<float>(p.param, p.count));
      s.params.insert(s.params.end(), kept.begin(), kept.end());
    }
  }
  SOTTO_ASSIGN(s.m, reader.elements(ArrayKey::kExpAvg, kAny));
  SOTTO_ASSIGN(s.v, reader.elements(ArrayKey::kExpAvgSq, 0));
  SOTTO_ASSIGN(const auto iteration, reader.common_integer(ArrayKey::kLastBatchIteration, -1));
  s.scheduler_iteration = iteration.value_or(static_cast<int64_t>(s.step) - 1);
  SOTTO_ASSIGN(const auto scale, reader.common_number(ArrayKey::kCurScale, kPositive));
  SOTTO_ASSIGN(const auto attempts, reader.common_integer(ArrayKey::kCurIter, 0));
  SOTTO_ASSIGN(const auto overflow, reader.common_integer(ArrayKey::kLastOverflowIter, -1));
  s.loss_scale = {scale.value_or(1), static_cast<uint64_t>(attempts.value_or(0)),
                  overflow.value_or(-1)};
  s.tensor_states.resize(params_.size());
  if (onebit_lamb()) SOTTO_TRY(read_onebit_lamb(reader, &s));
  if (zeroone()) SOTTO_TRY(read_zeroone(reader, &s));
  return s;
}

// Before freeze_step coefficients start again. Behind it they are the file's; without scaling
// coefficients the compressed stage has not made a step yet, and begins with the next one.
Status Optimizer::read_onebit_lamb(const ArrayReader& reader, OptimSnapshot* s) const {
  if (!s->compressed) {
    s->average_since = s->step;
    return ok_status();
  }
  std::vector<ArrayKey> needed{ArrayKey::kLambCoeffFreeze};
  s->stage_started = reader.has(ArrayKey::kScalingCoeff);
  if (s->stage_started) {
    needed.insert(needed.end(),
                  {ArrayKey::kScalingCoeff, ArrayKey::kLastFactor, ArrayKey::kExpAvgSqFresh});
  }
  SOTTO_TRY(reader.need(needed));
  for (uint64_t t = 0; t < params_.size(); ++t) {
    TensorState& state = s->tensor_states[t];
    SOTTO_ASSIGN(const auto average, reader.number(ArrayKey::kLambCoeffFreeze, t, 0));
    state.c_avg = average.value_or(state.c_avg);
    if (!s->stage_started) continue;
    SOTTO_ASSIGN(const auto factor, reader.number(ArrayKey::kLastFactor, t, kPositive));
    SOTTO_ASSIGN(const auto scaling, reader.number(ArrayKey::kScalingCoeff, t, kPositive));
    state.last_factor = factor.value_or(state.last_factor);
    state.scaling_coeff = scaling.value_or(state.scaling_coeff);
  }
  if (!s->stage_started) return ok_status();
  SOTTO_ASSIGN(s->vf, reader.elements(ArrayKey::kExpAvgSqFresh, 0));
  return ok_status();
}

Status Optimizer::read_zeroone(const ArrayReader& reader, OptimSnapshot* s) const {
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
  ZeroOneSchedule schedule(groups_[0]);
  SOTTO_TRY(schedule.restore(s->zeroone, s->step, s->step + s->step_offset)
                .with_prefix(
                    "arrays var_interval, var_counter, local_step_interval, local_step_counter"));
  s->lr_sums.assign(groups_.size(), 0.0);
  s->anchor_decays.assign(groups_.size(), 1.0);
  const bool between = reader.has(ArrayKey::kLrs) || reader.has(ArrayKey::kMomentumAccumulator);
  if (!s->zeroone.frozen || !between) return ok_status();
  SOTTO_TRY(reader.need(std::array{ArrayKey::kLrs, ArrayKey::kMomentumAccumulator}));
  SOTTO_ASSIGN(const auto sums, reader.common_numbers(ArrayKey::kLrs, 0, groups_.size()));
  for (size_t g = 0; g < groups_.size(); ++g) s->lr_sums[g] = sums[g].value_or(0);
  return read_local_sum(reader, s);
}

// Between synchronisations a checkpoint has rank 0's parameters and what its local updates since
// the last one have added to them (momentum_accumulator), weight decay included. In mode compat
// that is what is kept here, else the anchor, what it has decayed to, and the sum of learning rate
// times momentum.
Status Optimizer::read_local_sum(const ArrayReader& reader, OptimSnapshot* s) const {
  SOTTO_ASSIGN(const std::vector<float> added,
               reader.elements(ArrayKey::kMomentumAccumulator, kAny));
  for (size_t g = 0; g < groups_.size(); ++g)
    s->anchor_decays[g] = std::exp(-groups_[g].weight_decay * s->lr_sums[g]);
  if (!compat()) s->anchor = s->params;
  s->local_sum.assign(s->params.size(), 0.0f);
  uint64_t first = 0;
  for (uint64_t t = 0; t < params_.size(); ++t) {
    const ParamSpec& p = params_[t];
    const double decay = s->anchor_decays[p.group];
    for (uint64_t i = first; i < first + p.count; ++i) {
      if (s->lr_sums[p.group] == 0 && added[i] != 0) {
        return invalid_argument(
            "array \"{}\" is not 0 (element {} of \"{}\" is {}), but \"{}\" is 0: there have been "
            "no local updates",
            printable(reader.name_of(ArrayKey::kMomentumAccumulator, t), 300), i - first, p.name,
            added[i], printable(reader.name_of(ArrayKey::kLrs, t), 300));
      }
      if (compat()) {
        s->local_sum[i] = added[i];
        continue;
      }
      const bool masked = (p.mask != nullptr && p.mask[i - first] == 0) ||
                          (s->v[i] == 0 && may_mask_zero_variance());
      if (masked) {
        s->anchor[i] = static_cast<float>(s->params[i] / decay);
        continue;
      }
      const float den = std::sqrt(s->v[i]) + static_cast<float>(groups_[p.group].eps);
      s->anchor[i] = s->params[i] - added[i];
      s->local_sum[i] = static_cast<float>((s->params[i] - decay * s->anchor[i]) * den);
    }
    first += p.count;
  }
  s->stage_started =
      std::any_of(s->lr_sums.begin(), s->lr_sums.end(), [](double sum) { return sum > 0; });
  s->local_sum_is_common = true;
  return ok_status();
}

}  // namespace sotto
