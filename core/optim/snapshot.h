// Everything that a run must keep of an optimizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/codec/compressed_state.h"
#include "core/optim/loss_scale.h"

namespace sotto {

// Longest state of the trainer's own.
inline constexpr uint64_t kMaxUserState = uint64_t{1} << 26;

// Which error feedback belongs to a state.
enum class StateErrors : uint8_t { kNone, kOwn, kMean };

// Arrays that every state may have, float32 in the order of the tensors, without padding; an
// algorithm adds its own.
inline constexpr std::string_view kParamsArray = "params";
inline constexpr std::string_view kMomentumPadding = "padding_m";  // "m" of padding that is data
inline constexpr std::string_view kWorkerError = "worker_error", kServerError = "server_error";
inline constexpr std::string_view kMeanWorkerError = "mean_worker_error";
inline constexpr std::string_view kMeanServerError = "mean_server_error";

// Independent of how the state lies in memory.
class OptimSnapshot {
 public:
  struct Array {
    std::string name;
    uint64_t bytes = 0;             // of its values
    std::vector<std::byte> values;  // all of them; or none, if they are elsewhere
  };
  // A counter or flag of the algorithm's own. "group.name": one of several that belong together.
  struct Number {
    std::string name;
    uint64_t value = 0;
    bool flag = false;
  };

  std::string algorithm;        // "Adam", "AdamW", "Lamb", "OneBitLamb"
  std::string mode = "strict";  // or "compat"
  uint64_t step = 0;
  uint32_t step_offset = 0;
  int64_t scheduler_iteration = -1;
  LossScale loss_scale;
  uint64_t skipped_steps = 0;
  std::vector<std::string> names;
  std::vector<uint64_t> counts;
  std::vector<std::byte> user;            // the trainer's own
  std::vector<std::byte> outer;           // of outer steps; empty: there are none
  std::optional<ErrorFeedback> residual;  // error feedback of this rank; empty: none stored
  std::optional<MeanErrorFeedback> mean;  // error feedback of all ranks; empty: none stored
  bool one_for_all = false;  // what is one rank's own is imported by all (never so in a blob)

  const std::vector<Number>& numbers() const { return numbers_; }
  uint64_t number(std::string_view name) const;  // 0: there is none
  bool flag(std::string_view name) const { return number(name) != 0; }
  void set_number(std::string_view name, uint64_t value) { set({std::string(name), value, false}); }
  void set_flag(std::string_view name, bool value) { set({std::string(name), value, true}); }
  bool has_numbers(std::string_view group) const;

  const std::vector<Array>& arrays() const { return arrays_; }
  bool has(std::string_view array) const { return find(array) != nullptr; }
  // Of an array or of error feedback, wherever its values are; 0: there is none.
  uint64_t bytes(std::string_view array) const;
  // Values that are here.
  template <class T>
  std::span<const T> values(std::string_view array) const {
    return const_cast<OptimSnapshot*>(this)->values<T>(array);
  }
  template <class T>
  std::span<T> values(std::string_view array) {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::span<std::byte> bytes = bytes_here(array);
    return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  template <class T>
  std::vector<T> copy_of(std::string_view array) const {
    const std::span<const T> from = values<T>(array);
    return {from.begin(), from.end()};
  }
  std::vector<float> floats(std::string_view array) const { return copy_of<float>(array); }

  // An array comes after those that are there.
  template <class T>
  void put(std::string_view array, std::span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    append(array, std::as_bytes(values));
  }
  template <class T>
  void put(std::string_view array, const std::vector<T>& values) {
    put(array, std::span<const T>(values));
  }
  // Its values are elsewhere.
  void put_outside(std::string_view array, uint64_t bytes);
  // More values of an array, or of error feedback.
  void append(std::string_view array, std::span<const std::byte> values);
  void remove(std::string_view array);

 private:
  const Array* find(std::string_view name) const;
  std::span<std::byte> bytes_here(std::string_view array);
  std::vector<float>* errors(std::string_view array);
  void set(Number number);

  std::vector<Array> arrays_;
  std::vector<Number> numbers_;
};

// INVALID_ARGUMENT unless a state has as many values of type T as the optimizer.
Status check_values(const char* what, uint64_t bytes, uint64_t want, uint64_t element_bytes = 4);

}  // namespace sotto
