// Momentum and variance of every type between a device and the host, where they are float32 in the
// order of the tensors, without padding.
#pragma once

#include <cstdint>
#include <span>

#include "core/base/narrow_state.h"
#include "core/base/status.h"
#include "core/codec/compressed_layout.h"
#include "core/engine/device_array.h"
#include "core/group/tensor_runs.h"

namespace sotto {

// Where an array lies: flat elements, and for fp8 the exponents of its blocks.
struct StateArray {
  StateType type = StateType::kF32;
  bool variance = false;  // fp8 has other codes for it
  void* elements = nullptr;
  void* exponents = nullptr;
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
