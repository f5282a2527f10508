// The memory of one error-compensated compressor on one rank: worker and server residual in their
// deferred form (what was encoded and its scale), counts of valid elements, and two buffers for the
// bits and scales of a result, so that an optimizer can keep its momentum in one while the next
// arrives in the other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/codec/onebit_layout.h"
#include "core/engine/device_array.h"
#include "core/plan/onebit.h"

namespace sotto {

// Error feedback of one rank, on the host.
struct OnebitResidual {
  int32_t rank = 0;
  int32_t size = 1;
  uint64_t chunk_align = 0;
  std::string granularity;    // "flat" or "tensor"
  std::string scale;          // "l2" or "l1"
  std::vector<float> worker;  // e of every element, the tensors one after the other
  std::vector<float> server;  // e of the own chunk, in the chunk's order
};

struct OnebitSettings {
  int32_t rank = 0;
  int32_t size = 1;
  uint64_t chunk_align = 512;
  OnebitGranularity granularity = OnebitGranularity::kFlat;
  ScaleKind scale = ScaleKind::kL2;
};

// Between the order of the tensors and the flat space (padding is 0).
std::vector<float> to_flat(const OnebitLayout& layout, const std::vector<float>& by_tensor);
std::vector<float> to_tensors(const OnebitLayout& layout, const std::vector<float>& flat);

class OnebitState {
 public:
  OnebitState() = default;
  // The layout must outlive the state. Residuals are 0; counts are those of an unmasked layout.
  static Result<OnebitState> make(Engine& engine, const OnebitLayout& layout,
                                  const OnebitSettings& settings);

  // Binds the slots; the result goes to the buffer that is not current.
  void bind(Run& run, const OnebitSlots& slots) const;
  void bind_current(Run& run, uint32_t bits_slot, uint32_t messages_slot) const;
  // The result becomes the current one.
  void flip() { current_ = 1 - current_; }
  const DeviceArray& current_bits() const { return bits_[current_]; }
  const DeviceArray& current_messages() const { return messages_[current_]; }

  // Counts of valid elements, from the valid bits (all 1: no mask).
  Status set_counts(Engine& engine, const std::vector<uint8_t>& valid_bits);

  // valid_bits: null if nothing is masked; masked elements have no error.
  Result<OnebitResidual> residual(Engine& engine, const std::vector<uint8_t>* valid_bits) const;
  // INVALID_ARGUMENT if it does not fit this rank and these settings.
  Status check(const OnebitResidual& residual) const;
  // null: zero.
  Status restore(Engine& engine, const OnebitResidual* residual);

  uint64_t bytes() const;

 private:
  const OnebitLayout* layout_ = nullptr;
  OnebitSettings settings_;
  DeviceArray worker_, worker_scale_, server_, server_scale_, worker_counts_, server_counts_;
  DeviceArray bits_[2], messages_[2];
  int current_ = 0;
};

}  // namespace sotto
