// The arrays of an optimizer's state, by name; and their values between a device and the host,
// where they are float32 in the order of the tensors, without padding.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/base/low_precision_state.h"
#include "core/base/status.h"
#include "core/codec/compressed_layout.h"
#include "core/codec/tensor_runs.h"
#include "core/engine/device_array.h"

namespace sotto {

// Where an array lies: flat elements, and for fp8 the exponents of its blocks.
struct StateArray {
  StateType type = StateType::kF32;
  bool variance = false;  // fp8 has other codes for it
  void* elements = nullptr;
  void* exponents = nullptr;
};

// An array that an algorithm keeps.
struct StateArraySpec {
  std::string_view name;  // of static storage
  uint64_t bytes = 0;     // without exponents
  bool exported = false;  // part of a state: a value per element of the tensors
  StateType type = StateType::kF32;
  bool variance = false;
};

class StateArrays {
 public:
  // Zeroed. Exponents: of low-precision types. A second array of a name takes the place of the
  // first.
  Status add(const DeviceAccess& access, const CompressedLayout& layout,
             const StateArraySpec& spec);
  bool has(std::string_view name) const { return find(name) != nullptr; }
  bool exports(std::string_view name) const {
    const Entry* entry = find(name);
    return entry != nullptr && entry->spec.exported;
  }
  // Null elements: there is none of that name.
  StateArray operator[](std::string_view name) const;
  void* data(std::string_view name) const { return (*this)[name].elements; }
  uint64_t bytes_of(std::string_view name) const;  // without exponents; 0: there is none
  uint64_t bytes() const;                          // of all

 private:
  struct Entry {
    StateArraySpec spec;
    DeviceArray elements, exponents;
  };
  const Entry* find(std::string_view name) const;

  std::vector<Entry> entries_;
};

// Bytes of the two parts.
uint64_t state_element_bytes(const CompressedLayout& layout, StateType type);
uint64_t state_exponent_bytes(const CompressedLayout& layout, StateType type);

// A run of tensor elements. Parts of it are contiguous on the device.
Status read_state(const DeviceAccess& access, const StateArray& array, const TensorRun& run,
                  float* out);
// To the nearest value that the type has. What read_state gave comes out of the next one unchanged.
Status write_state(const DeviceAccess& access, const StateArray& array, const TensorRun& run,
                   std::span<const float> values);

}  // namespace sotto
