// The arrays of a DeepSpeed checkpoint by name: which parameter and which part of its state each
// belongs to, and their values.
//
// A name is "<parameter>/<key>", "group:<index>/<key>" (elements of all parameters of that group,
// one after the other in order of registration; or a number that all of them have) or one of a
// few that belong to no parameter ("scheduler/last_batch_iteration").
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/engine/device_array.h"
#include "core/optim/parameter_set.h"
#include "core/optim/state_arrays.h"

namespace sotto {

// An array of a DeepSpeed checkpoint. Its name says what it is: see sotto.h.
struct NamedArray {
  std::string name;
  const void* data = nullptr;  // host or device memory, borrowed
  uint64_t count = 0;
  Dtype dtype = Dtype::kF32;
};

// What an array of a checkpoint may be called, behind its parameter or group.
struct ArrayKey {
  enum class Shape : uint8_t {
    kElements,   // as many as the parameter has
    kNumber,     // of a parameter, or of all parameters of a group
    kOwnNumber,  // of one parameter
    kRunNumber,  // of the run: the whole name
  };
  std::string_view word;  // of static storage
  Shape shape = Shape::kElements;
  std::string_view array;  // kElements: the array of the state that it becomes
};
// Those that are not of an array, or of one that every optimizer has or may have.
std::span<const ArrayKey> common_array_keys();

class ArrayReader {
 public:
  // What it is given has to live as long as the reader.
  // own: keys that the optimizer `type` has beside the common ones; has: the arrays of its state.
  ArrayReader(const DeviceAccess& access, std::span<const ParamSpec> params, std::string_view type,
              std::span<const ArrayKey> own, const StateArrays& has);

  // Sorts arrays out by name. INVALID_ARGUMENT or UNSUPPORTED: an unknown name, with the nearest
  // one that there is; an array given twice, or with a type or count that it cannot have; state
  // that is not imported. No value is read.
  Status take(std::span<const NamedArray> arrays);

  // Whether an array of this key was given for any parameter.
  bool has(std::string_view word) const;
  // INVALID_ARGUMENT with the names of what is not there. Parameters without elements need nothing.
  Status need(std::span<const std::string_view> words) const;

  // Of all parameters, one after the other in order of registration; 0 where nothing was given.
  // INVALID_ARGUMENT unless all are finite as float32 and at least `least`.
  Result<std::vector<float>> elements(std::string_view word, float least) const;
  // The number of one parameter, if it was given. INVALID_ARGUMENT unless it is finite as float32
  // and at least `least`.
  Result<std::optional<double>> number(std::string_view word, uint64_t tensor, double least) const;
  // The number of the run, or the one that is the same for all parameters; or one for each group,
  // the same for its parameters.
  Result<std::optional<double>> common_number(std::string_view word, double least) const;
  Result<std::vector<std::optional<double>>> common_numbers(std::string_view word, double least,
                                                            uint64_t groups) const;
  // The same of a whole number, of at most 2^53.
  Result<std::optional<int64_t>> common_integer(std::string_view word, int64_t least) const;

  // The name that the array of a key has, or would have.
  std::string name_of(std::string_view word, uint64_t tensor) const;

 private:
  // Where the values of one parameter are.
  struct Source {
    const NamedArray* array = nullptr;  // null: not given
    uint64_t first = 0;                 // element
  };
  struct Key {
    ArrayKey key;
    std::vector<Source> sources;  // per parameter
  };
  // What a word before the last slash stands for.
  struct Scope {
    std::vector<uint32_t> tensors;
    bool group = false;
  };

  std::vector<std::string_view> words_of(const Scope& scope) const;
  std::string nearest_name(std::string_view scope, std::string_view word) const;
  Status take_one(const NamedArray& array);
  // Of a word that there is.
  const Key& key_of(std::string_view word) const;
  Status place(const NamedArray& array, Key* key, std::span<const uint32_t> tensors);
  std::string given_name(std::string_view word) const;
  // slots: of a parameter, where its common number is.
  template <class Slot>
  Result<std::vector<std::optional<double>>> common(std::string_view word, double least,
                                                    uint64_t slots, Slot&& slot_of,
                                                    const char* scope) const;
  Result<std::vector<double>> values(const Source& source, uint64_t count) const;

  const DeviceAccess& access_;
  std::span<const ParamSpec> params_;
  std::string_view type_;
  std::map<std::string, Scope, std::less<>> scopes_;  // parameters and groups
  std::vector<Key> keys_;
  std::vector<std::string> refused_;  // names of what is never imported
};

}  // namespace sotto
