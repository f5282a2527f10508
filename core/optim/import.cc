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

// Ranks import the same, or all of them nothing. Collective.
Status compare(Comm& comm, const Result<OptimSnapshot>& mine) {
  ImportWord word;
  word.taken = mine.ok() ? 1 : 0;
  if (mine.ok()) {
    word.parts = hashes_of(*mine);
  } else {
    const std::string& text = mine.status().text();
    std::memcpy(word.text, text.data(), std::min(text.size(), sizeof word.text));
  }
  const Result<std::vector<std::string>> all = comm.exchange(
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
                   r, comm.rank(), kParts[i]);
    }
  }
  return ok_status();
}

}  // namespace

Status Optimizer::import_arrays(const Result<std::vector<NamedArray>>& arrays) {
  const auto read = [&]() -> Result<OptimSnapshot> {
    SOTTO_TRY(check_idle());
    if (!arrays.ok()) return arrays.status();
    SOTTO_ASSIGN(OptimSnapshot s, read_arrays(*arrays));
    SOTTO_TRY(check_snapshot(s, StateErrors::kNone));
    return s;
  };
  const Result<OptimSnapshot> snapshot = read();
  // All ranks take part in the comparison, also one that refuses its arrays.
  SOTTO_TRY(compare(*data_.comm, snapshot));
  return restore(*snapshot, false);
}

// Everything but what only one of the types has is read here.
Result<OptimSnapshot> Optimizer::read_arrays(std::span<const NamedArray> arrays) const {
  SOTTO_TRY(algorithm_->check_importable());
  ArrayReader reader(data_.access, data_.parameters.specs(), data_.config.optimizer.kind);
  SOTTO_TRY(reader.take(arrays));
  SOTTO_TRY(reader.need(std::array{ArrayKey::kStep}));
  OptimSnapshot s;
  s.algorithm = std::string(optimizer_kind_name(data_.config.optimizer.kind));
  s.mode = std::string(mode_name(data_.mode()));
  s.step_offset = data_.step_offset();
  SOTTO_ASSIGN(const auto t, reader.common_integer(ArrayKey::kStep, s.step_offset));
  s.step = static_cast<uint64_t>(t.value_or(s.step_offset)) - s.step_offset;

  std::vector<ArrayKey> needed{ArrayKey::kExpAvg, ArrayKey::kExpAvgSq};
  if (reader.has(ArrayKey::kFp32)) needed.push_back(ArrayKey::kFp32);
  if (data_.config.scheduler.kind != SchedulerKind::kNone)
    needed.push_back(ArrayKey::kLastBatchIteration);
  if (loss_scaler_.dynamic()) {
    needed.insert(needed.end(),
                  {ArrayKey::kCurScale, ArrayKey::kCurIter, ArrayKey::kLastOverflowIter});
  }
  SOTTO_TRY(reader.need(needed));

  for (const ParamSpec& p : data_.parameters) {
    s.names.push_back(p.name);
    s.counts.push_back(p.count);
  }
  if (reader.has(ArrayKey::kFp32)) {
    SOTTO_ASSIGN(s.params, reader.elements(ArrayKey::kFp32, kAny));
  } else {
    for (const ParamSpec& p : data_.parameters) {
      SOTTO_ASSIGN(const std::vector<float> kept, data_.access.download<float>(p.param, p.count));
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
  s.tensor_states.resize(data_.parameters.size());
  SOTTO_TRY(algorithm_->read_arrays(reader, &s));
  return s;
}

}  // namespace sotto
