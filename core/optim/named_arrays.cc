#include "core/optim/named_arrays.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/base/text.h"
#include "core/optim/snapshot.h"

namespace sotto {
namespace {

using Shape = ArrayKey::Shape;

constexpr ArrayKey kCommonKeys[] = {
    {"fp32", Shape::kElements, kParamsArray},
    {"exp_avg", Shape::kElements, "m"},
    {"exp_avg_sq", Shape::kElements, "v"},
    {"step", Shape::kNumber, {}},
    {"scheduler/last_batch_iteration", Shape::kRunNumber, {}},
    {"loss_scaler/cur_scale", Shape::kRunNumber, {}},
    {"loss_scaler/cur_iter", Shape::kRunNumber, {}},
    {"loss_scaler/last_overflow_iter", Shape::kRunNumber, {}},
};

// In checkpoints, but of no use: errors of rank 0 alone, and sizes that follow from the others.
constexpr std::string_view kNeverImported[] = {"worker_error", "server_error", "tensor_size",
                                               "corrected_tensor_size", "server_chunk_size"};

constexpr size_t kMaxListed = 8;
constexpr double kMaxWhole = 9007199254740992.0;  // 2^53

bool is_in(std::span<const std::string_view> words, std::string_view word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// A name is at most 255 bytes of a parameter, a slash and a key.
std::string shown(std::string_view name) { return printable(name, 300); }

// Not more than a few of them.
std::string list_of(const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < std::min(names.size(), kMaxListed); ++i)
    out += fmt::format("{}\"{}\"", i == 0 ? "" : ", ", shown(names[i]));
  if (names.size() > kMaxListed) out += fmt::format(" and {} more", names.size() - kMaxListed);
  return out;
}

double value_at(Dtype type, const void* values, uint64_t i) {
  switch (type) {
    case Dtype::kF64: return static_cast<const double*>(values)[i];
    case Dtype::kI64: return static_cast<double>(static_cast<const int64_t*>(values)[i]);
    case Dtype::kI32: return static_cast<const int32_t*>(values)[i];
    default: return static_cast<double>(float_at(type, values, i));
  }
}

// Without a conversion that overflows.
bool fits_float(double x) { return std::abs(x) <= std::numeric_limits<float>::max(); }

Status check_dtype(const NamedArray& array, bool elements) {
  const Dtype d = array.dtype;
  const bool fits =
      elements ? dtype_is_float(d)
               : d == Dtype::kI32 || d == Dtype::kI64 || d == Dtype::kF32 || d == Dtype::kF64;
  if (fits) return ok_status();
  return unsupported("array \"{}\" is {}; allowed: {}", shown(array.name), dtype_name(d),
                     elements ? "fp32, fp16, bf16, fp64" : "int64, int32, fp64, fp32");
}

}  // namespace

std::span<const ArrayKey> common_array_keys() { return kCommonKeys; }

ArrayReader::ArrayReader(const DeviceAccess& access, std::span<const ParamSpec> params,
                         std::string_view type, std::span<const ArrayKey> own,
                         const StateArrays& has)
    : access_(access), params_(params), type_(type) {
  for (uint32_t t = 0; t < params.size(); ++t) {
    Scope& group = scopes_[fmt::format("group:{}", params[t].group)];
    group.tensors.push_back(t);
    group.group = true;
  }
  // A parameter's own name goes first.
  for (uint32_t t = 0; t < params.size(); ++t) scopes_[params[t].name] = {{t}, false};
  for (const ArrayKey& key : kCommonKeys) {
    if (key.shape != Shape::kElements || key.array == kParamsArray || has.has(key.array))
      keys_.push_back({key, {}});
  }
  for (const ArrayKey& key : own) keys_.push_back({key, {}});
  for (Key& key : keys_) key.sources.resize(params.size());
}

const ArrayReader::Key& ArrayReader::key_of(std::string_view word) const {
  return *std::find_if(keys_.begin(), keys_.end(),
                       [&](const Key& k) { return k.key.word == word; });
}

std::string ArrayReader::name_of(std::string_view word, uint64_t tensor) const {
  const Key& key = key_of(word);
  const NamedArray* given = key.sources[tensor].array;
  if (given != nullptr) return given->name;
  if (key.key.shape == Shape::kRunNumber) return std::string(word);
  return fmt::format("{}/{}", params_[tensor].name, word);
}

// The keys that an array of a parameter or of a group may have here.
std::vector<std::string_view> ArrayReader::words_of(const Scope& scope) const {
  std::vector<std::string_view> words;
  for (const Key& k : keys_) {
    if (k.key.shape == Shape::kRunNumber || (k.key.shape == Shape::kOwnNumber && scope.group))
      continue;
    words.push_back(k.key.word);
  }
  return words;
}

std::string ArrayReader::nearest_name(std::string_view scope, std::string_view word) const {
  std::vector<std::string_view> scopes;
  for (const auto& [name, tensors] : scopes_) scopes.push_back(name);
  const std::string_view near_scope = nearest_word(scope, scopes);
  const std::vector<std::string_view> words = words_of(scopes_.find(near_scope)->second);
  const std::string candidate = fmt::format("{}/{}", near_scope, nearest_word(word, words));
  std::vector<std::string_view> candidates{candidate};
  for (const Key& k : keys_) {
    if (k.key.shape == Shape::kRunNumber) candidates.push_back(k.key.word);
  }
  return std::string(nearest_word(fmt::format("{}/{}", scope, word), candidates));
}

Status ArrayReader::take(std::span<const NamedArray> arrays) {
  for (const NamedArray& array : arrays) SOTTO_TRY(take_one(array));
  if (refused_.empty()) return ok_status();
  return invalid_argument(
      "{} cannot be imported: a checkpoint has error feedback of rank 0 only, so that of all ranks "
      "starts at 0, and sizes follow from the parameters; leave out what ends in worker_error, "
      "server_error, tensor_size, corrected_tensor_size and server_chunk_size",
      list_of(refused_));
}

Status ArrayReader::take_one(const NamedArray& array) {
  const std::string_view name = array.name;
  const auto found = [&](std::string_view word, bool of_run) {
    return std::find_if(keys_.begin(), keys_.end(), [&](const Key& k) {
      return k.key.word == word && (k.key.shape == Shape::kRunNumber) == of_run;
    });
  };
  if (const auto key = found(name, true); key != keys_.end()) {
    static constexpr uint32_t kFirst[] = {0};
    return place(array, &*key, kFirst);
  }
  const size_t slash = name.rfind('/');
  const std::string_view scope_name = slash == name.npos ? "" : name.substr(0, slash);
  const std::string_view word = slash == name.npos ? name : name.substr(slash + 1);
  const auto scope = scopes_.find(scope_name);
  if (scope != scopes_.end() && is_in(kNeverImported, word)) {
    refused_.push_back(array.name);
    return ok_status();
  }
  if (scope != scopes_.end() && is_in(words_of(scope->second), word))
    return place(array, &*found(word, false), scope->second.tensors);
  if (scope != scopes_.end() && is_in(words_of({{}, false}), word)) {
    return invalid_argument("array \"{}\" is of one parameter each; allowed: \"<parameter>/{}\"",
                            shown(name), word);
  }
  return invalid_argument("{} has no array \"{}\"; the nearest name is \"{}\"", type_, shown(name),
                          nearest_name(scope_name, word));
}

Status ArrayReader::place(const NamedArray& array, Key* key, std::span<const uint32_t> tensors) {
  const bool elements = key->key.shape == Shape::kElements;
  SOTTO_TRY(check_dtype(array, elements));
  std::vector<Source>& sources = key->sources;
  uint64_t count = 0;
  for (const uint32_t t : tensors) {
    if (const NamedArray* other = sources[t].array; other != nullptr) {
      if (other->name == array.name)
        return invalid_argument("array \"{}\" is given twice", shown(array.name));
      return invalid_argument("arrays \"{}\" and \"{}\" are of the same parameter; give one",
                              shown(other->name), shown(array.name));
    }
    sources[t] = {&array, elements ? count : 0};
    count += params_[t].count;
  }
  const uint64_t wanted = elements ? count : 1;
  if (array.count == wanted) return ok_status();
  return invalid_argument("array \"{}\" has {}; allowed: {}", shown(array.name),
                          counted(array.count, "element"), wanted);
}

bool ArrayReader::has(std::string_view word) const {
  const std::vector<Source>& sources = key_of(word).sources;
  return std::any_of(sources.begin(), sources.end(),
                     [](const Source& s) { return s.array != nullptr; });
}

Status ArrayReader::need(std::span<const std::string_view> words) const {
  std::vector<std::string> missing;
  for (const std::string_view word : words) {
    const Key& key = key_of(word);
    const bool of_run = key.key.shape == Shape::kRunNumber;
    for (uint64_t t = 0; t < (of_run ? 1 : params_.size()); ++t) {
      if (key.sources[t].array != nullptr) continue;
      if (of_run || params_[t].count != 0) missing.push_back(name_of(word, t));
    }
  }
  if (missing.empty()) return ok_status();
  const bool one = missing.size() == 1;
  return invalid_argument("{} {} {} missing", one ? "array" : "arrays", list_of(missing),
                          one ? "is" : "are");
}

std::string ArrayReader::given_name(std::string_view word) const {
  for (const Source& source : key_of(word).sources) {
    if (source.array != nullptr) return source.array->name;
  }
  return std::string(word);
}

Result<std::vector<double>> ArrayReader::values(const Source& source, uint64_t count) const {
  const Dtype type = source.array->dtype;
  const auto* first =
      static_cast<const std::byte*>(source.array->data) + source.first * dtype_bytes(type);
  SOTTO_ASSIGN(const std::vector<std::byte> bytes,
               access_.download<std::byte>(first, count * dtype_bytes(type)));
  std::vector<double> out(count);
  for (uint64_t i = 0; i < count; ++i) out[i] = value_at(type, bytes.data(), i);
  return out;
}

Result<std::vector<float>> ArrayReader::elements(std::string_view word, float least) const {
  std::vector<float> out;
  for (uint64_t t = 0; t < params_.size(); ++t) {
    const Source& source = key_of(word).sources[t];
    const uint64_t first = out.size();
    out.resize(first + params_[t].count, 0.0f);
    if (source.array == nullptr) continue;
    SOTTO_ASSIGN(const std::vector<double> read, values(source, params_[t].count));
    for (uint64_t i = 0; i < read.size(); ++i) {
      if (!fits_float(read[i]) || read[i] < least) {
        return invalid_argument("array \"{}\", element {} is {}; allowed: {}",
                                shown(source.array->name), source.first + i, read[i],
                                least == 0 ? "finite numbers of at least 0" : "finite numbers");
      }
      out[first + i] = static_cast<float>(read[i]);
    }
  }
  return out;
}

Result<std::optional<double>> ArrayReader::number(std::string_view word, uint64_t tensor,
                                                  double least) const {
  const Source& source = key_of(word).sources[tensor];
  if (source.array == nullptr) return std::optional<double>();
  SOTTO_ASSIGN(const std::vector<double> read, values(source, 1));
  if (fits_float(read[0]) && read[0] >= least) return std::optional<double>(read[0]);
  return invalid_argument("array \"{}\" is {}; allowed: a finite number of at least {}",
                          shown(source.array->name), read[0], least);
}

template <class Slot>
Result<std::vector<std::optional<double>>> ArrayReader::common(std::string_view word, double least,
                                                               uint64_t slots, Slot&& slot_of,
                                                               const char* scope) const {
  std::vector<std::optional<double>> out(slots);
  std::vector<uint64_t> from(slots);
  for (uint64_t t = 0; t < params_.size(); ++t) {
    SOTTO_ASSIGN(const std::optional<double> x, number(word, t, least));
    if (!x) continue;
    const uint64_t slot = slot_of(params_[t]);
    if (out[slot] && *x != *out[slot]) {
      return invalid_argument(
          "array \"{}\" is {}, but \"{}\" is {}; allowed: one value for all parameters{}",
          shown(name_of(word, t)), *x, shown(name_of(word, from[slot])), *out[slot], scope);
    }
    if (!out[slot]) from[slot] = t;
    out[slot] = x;
  }
  return out;
}

Result<std::optional<double>> ArrayReader::common_number(std::string_view word,
                                                         double least) const {
  SOTTO_ASSIGN(const auto numbers, common(
                                       word, least, 1, [](const ParamSpec&) { return 0; }, ""));
  return numbers[0];
}

Result<std::vector<std::optional<double>>> ArrayReader::common_numbers(std::string_view word,
                                                                       double least,
                                                                       uint64_t groups) const {
  return common(
      word, least, groups, [](const ParamSpec& p) { return p.group; }, " of a group");
}

Result<std::optional<int64_t>> ArrayReader::common_integer(std::string_view word,
                                                           int64_t least) const {
  SOTTO_ASSIGN(const std::optional<double> x, common_number(word, static_cast<double>(least)));
  if (!x) return std::optional<int64_t>();
  if (*x == std::floor(*x) && *x <= kMaxWhole)
    return std::optional<int64_t>(static_cast<int64_t>(*x));
  return invalid_argument("array \"{}\" is {}; allowed: whole numbers from {} to 2^53",
                          shown(given_name(word)), *x, least);
}

}  // namespace sotto
