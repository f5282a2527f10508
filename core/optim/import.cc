// From the arrays of a DeepSpeed checkpoint to a snapshot (specification section 12).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core/base/hash.h"
#include "core/base/text.h"
#include "core/optim/agreement.h"
#include "core/optim/optimizer.h"

namespace sotto {
namespace {

constexpr float kAny = std::numeric_limits<float>::lowest();
constexpr double kPositive = std::numeric_limits<float>::min();

// What ranks compare: the numbers of a snapshot, those of its algorithm, then its arrays in order.
constexpr size_t kFirstArray = 2;
constexpr size_t kMostParts = 16;
using PartHashes = std::array<uint64_t, kMostParts>;

PartHashes hashes_of(const OptimSnapshot& s) {
  Hasher64 numbers, own;
  const auto add = [](Hasher64& hasher, const auto& value) { hasher.update(&value, sizeof value); };
  add(numbers, s.step);
  add(numbers, s.scheduler_iteration);
  add(numbers, s.loss_scale.scale);
  add(numbers, s.loss_scale.iteration);
  add(numbers, s.loss_scale.last_overflow);
  for (const OptimSnapshot::Number& number : s.numbers()) add(own, number.value);
  PartHashes out{numbers.digest(), own.digest()};
  size_t part = kFirstArray;
  for (const OptimSnapshot::Array& array : s.arrays()) {
    if (part < out.size()) out[part++] = hash64(array.values.data(), array.values.size());
  }
  return out;
}

// As the caller knows it.
std::string_view name_of_part(const OptimSnapshot& s, size_t part,
                              std::span<const ArrayKey> own_keys) {
  if (part == 0) return "step, scheduler or loss scaler";
  if (part == 1) return "schedule";
  if (part - kFirstArray >= s.arrays().size()) return "an array that only one of them has";
  const std::string_view array = s.arrays()[part - kFirstArray].name;
  if (array == kParamsArray) return "parameters";
  for (const std::span<const ArrayKey> keys : {common_array_keys(), own_keys}) {
    for (const ArrayKey& key : keys) {
      if (key.array == array) return key.word;
    }
  }
  return array;
}

// What a rank tells the others: whether it takes its arrays, else the beginning of its error.
struct ImportWord {
  uint64_t taken = 0;
  PartHashes parts = {};
  char text[256] = {};
};

// Of the values of an array, tensor by tensor; 0: it has none of a tensor's own.
std::vector<uint64_t> tensor_hashes(const OptimSnapshot& s, size_t array) {
  std::vector<uint64_t> hashes(s.names.size());
  if (array >= s.arrays().size()) return hashes;
  const std::span<const std::byte> values = s.arrays()[array].values;
  uint64_t elements = 0;
  for (const uint64_t count : s.counts) elements += count;
  const bool per_tensor = s.arrays()[array].name == "tensor_states";
  if (!per_tensor && values.size() != elements * sizeof(float)) return hashes;
  size_t at = 0;
  for (size_t t = 0; t < hashes.size(); ++t) {
    const size_t bytes = per_tensor ? sizeof(TensorState) : s.counts[t] * sizeof(float);
    hashes[t] = hash64(values.data() + at, bytes);
    at += bytes;
  }
  return hashes;
}

// " of parameter ...": the first tensor in which an array differs between ranks; empty: in none.
Result<std::string> differing_tensor(Comm& comm, const OptimSnapshot& mine, size_t array) {
  const std::vector<uint64_t> hashes = tensor_hashes(mine, array);
  const size_t bytes = hashes.size() * sizeof(uint64_t);
  SOTTO_ASSIGN(
      const std::vector<std::string> all,
      comm.exchange({reinterpret_cast<const char*>(hashes.data()), bytes}, OpKind::kOptimImport));
  size_t first = bytes;
  for (const std::string& other : all) {
    const auto at = std::mismatch(all[0].begin(), all[0].end(), other.begin()).first;
    first = std::min(first, static_cast<size_t>(at - all[0].begin()));
  }
  if (first == bytes) return std::string();
  return fmt::format(" of parameter \"{}\"", mine.names[first / sizeof(uint64_t)]);
}

// The first part in which ranks differ from rank 0, and who they are. All ranks compare the same
// words, so that all of them look for the tensor.
Status name_difference(Comm& comm, const std::vector<ImportWord>& all, const OptimSnapshot& mine,
                       std::span<const ArrayKey> own_keys) {
  for (size_t i = 0; i < kMostParts; ++i) {
    std::vector<size_t> others;
    for (size_t r = 1; r < all.size(); ++r) {
      if (all[r].parts[i] != all[0].parts[i]) others.push_back(r);
    }
    if (others.empty()) continue;
    std::string tensor;
    if (i >= kFirstArray) {
      SOTTO_ASSIGN(tensor, differing_tensor(comm, mine, i - kFirstArray));
    }
    return error(Code::kProtocol,
                 "ranks 0 and {} import different values ({}){}; every rank has to give the same "
                 "arrays; nothing is imported",
                 list_of_ranks(others), name_of_part(mine, i, own_keys), tensor);
  }
  return ok_status();
}

// Ranks import the same, or all of them nothing. Collective.
Status compare(Comm& comm, const Result<OptimSnapshot>& mine, std::span<const ArrayKey> own_keys) {
  ImportWord word;
  word.taken = mine.ok() ? 1 : 0;
  if (mine.ok()) {
    word.parts = hashes_of(*mine);
  } else {
    const std::string& text = mine.status().text();
    std::memcpy(word.text, text.data(), std::min(text.size(), sizeof word.text));
  }
  const Result<std::vector<std::string>> words = comm.exchange(
      std::string(reinterpret_cast<const char*>(&word), sizeof word), OpKind::kOptimImport);
  SOTTO_TRY(mine.status());
  SOTTO_TRY(words.status());
  std::vector<ImportWord> all(words->size());
  for (size_t r = 0; r < all.size(); ++r) {
    std::memcpy(&all[r], (*words)[r].data(), sizeof word);
    if (all[r].taken != 0) continue;
    return error(Code::kProtocol, "rank {} refuses its arrays, nothing is imported: {}", r,
                 printable(std::string_view(all[r].text, strnlen(all[r].text, sizeof word.text)),
                           sizeof word.text));
  }
  return name_difference(comm, all, *mine, own_keys);
}

// Everything but what only one of the types has is read here.
Result<OptimSnapshot> read_arrays(const OptimizerData& data, const Algorithm& algorithm,
                                  bool dynamic_loss_scale, std::span<const NamedArray> arrays) {
  SOTTO_TRY(algorithm.check_importable());
  ArrayReader reader(data.access, data.parameters.specs(),
                     optimizer_kind_name(data.config.optimizer.kind), algorithm.array_keys(),
                     data.arrays);
  SOTTO_TRY(reader.take(arrays));
  SOTTO_TRY(reader.need(std::array<std::string_view, 1>{"step"}));
  OptimSnapshot s;
  s.algorithm = std::string(optimizer_kind_name(data.config.optimizer.kind));
  s.mode = std::string(mode_name(data.mode()));
  s.step_offset = data.step_offset();
  SOTTO_ASSIGN(const auto t, reader.common_integer("step", s.step_offset));
  s.step = static_cast<uint64_t>(t.value_or(s.step_offset)) - s.step_offset;

  const bool variance = data.arrays.has("v");
  std::vector<std::string_view> needed{"exp_avg"};
  if (variance) needed.push_back("exp_avg_sq");
  if (reader.has("fp32")) needed.push_back("fp32");
  if (data.config.scheduler.kind != SchedulerKind::kNone)
    needed.push_back("scheduler/last_batch_iteration");
  if (dynamic_loss_scale) {
    needed.insert(needed.end(), {"loss_scaler/cur_scale", "loss_scaler/cur_iter",
                                 "loss_scaler/last_overflow_iter"});
  }
  SOTTO_TRY(reader.need(needed));

  for (const ParamSpec& p : data.parameters) {
    s.names.push_back(p.name);
    s.counts.push_back(p.count);
  }
  if (reader.has("fp32")) {
    SOTTO_ASSIGN(const std::vector<float> values, reader.elements("fp32", kAny));
    s.put(kParamsArray, values);
  } else {
    s.put_outside(kParamsArray, 0);
    for (const ParamSpec& p : data.parameters) {
      SOTTO_ASSIGN(const std::vector<float> kept, data.access.download<float>(p.param, p.count));
      s.append(kParamsArray, std::as_bytes(std::span<const float>(kept)));
    }
  }
  SOTTO_ASSIGN(const std::vector<float> m, reader.elements("exp_avg", kAny));
  s.put("m", m);
  if (variance) {
    SOTTO_ASSIGN(const std::vector<float> v, reader.elements("exp_avg_sq", 0));
    s.put("v", v);
  }
  SOTTO_ASSIGN(const auto iteration, reader.common_integer("scheduler/last_batch_iteration", -1));
  s.scheduler_iteration = iteration.value_or(static_cast<int64_t>(s.step) - 1);
  SOTTO_ASSIGN(const auto scale, reader.common_number("loss_scaler/cur_scale", kPositive));
  SOTTO_ASSIGN(const auto attempts, reader.common_integer("loss_scaler/cur_iter", 0));
  SOTTO_ASSIGN(const auto overflow, reader.common_integer("loss_scaler/last_overflow_iter", -1));
  s.loss_scale = {scale.value_or(1), static_cast<uint64_t>(attempts.value_or(0)),
                  overflow.value_or(-1)};
  s.put("tensor_states", std::vector<TensorState>(data.parameters.size()));
  SOTTO_TRY(algorithm.read_arrays(reader, &s));
  return s;
}

}  // namespace

Status Optimizer::import_arrays(const Result<std::vector<NamedArray>>& arrays) {
  const auto read = [&]() -> Result<OptimSnapshot> {
    SOTTO_TRY(check_idle());
    if (!arrays.ok()) return arrays.status();
    SOTTO_ASSIGN(OptimSnapshot s, read_arrays(data_, *algorithm_, loss_scaler_.dynamic(), *arrays));
    SOTTO_TRY(algorithm_->accepts(s, StateErrors::kNone));
    return s;
  };
  const Result<OptimSnapshot> snapshot = read();
  // All ranks take part in the comparison, also one that refuses its arrays.
  SOTTO_TRY(compare(*data_.group, snapshot, algorithm_->array_keys()));
  return restore(*snapshot, false);
}

}  // namespace sotto
