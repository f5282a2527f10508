// The memory of one error-compensated compressor on one rank: worker and server residual, and for
// 1 bit counts of valid elements and two buffers for the bits and scales of a result, so that an
// optimizer can keep its momentum in one while the next arrives in the other. 1-bit residuals are
// in their deferred form (what was encoded and its scale). The server's has two buffers as well:
// what a step makes of it counts only when the step commits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/codec/onebit_layout.h"
#include "core/engine/device_array.h"
#include "core/group/comm.h"
#include "core/plan/onebit.h"

namespace sotto {

// Error feedback of one rank, on the host.
struct OnebitResidual {
  int32_t rank = 0;
  int32_t size = 1;
  uint64_t chunk_align = 0;
  std::string granularity;       // "flat", "group", "tensor" or "bucket"
  uint64_t bucket_elements = 0;  // "bucket"
  std::string scale;             // "l2" or "l1"; other codecs: "bf16", "int8/256", ...
  std::vector<float> worker;     // e of every element, the tensors one after the other, then
                                 // padding that is data
  std::vector<float> server;     // e of the own chunk, in the chunk's order
};

// Error feedback of all ranks in the order of the tensors, one after the other: what it adds to the
// future results does not depend on the number of ranks (specification, I5 and section 12).
struct OnebitMean {
  std::vector<float> worker;  // mean over ranks of the workers' errors
  std::vector<float> server;  // errors of the servers
};

struct OnebitSettings {
  int32_t rank = 0;
  int32_t size = 1;
  uint64_t chunk_align = 512;
  OnebitGranularity granularity = OnebitGranularity::kFlat;
  ScaleKind scale = ScaleKind::kL2;
  uint64_t bucket_elements = 0;  // kBucket
  CodecKind kind = CodecKind::kOnebit;
  uint32_t block = 0;    // int8 and int4
  bool residual = true;  // false: no state at all; 1 bit always has one
  // 1 bit, mode compat: padding is data, has error feedback and counts in the scales.
  bool compat = false;
};

// Between the order of the tensors and the flat space. by_tensor: elements() values, and padding is
// 0, or elements_with_padding(). padding: with padding that is data.
std::vector<float> to_flat(const OnebitLayout& layout, const std::vector<float>& by_tensor);
std::vector<float> to_tensors(const OnebitLayout& layout, const std::vector<float>& flat,
                              bool padding = false);

class OnebitState {
 public:
  OnebitState() = default;
  // The layout must outlive the state. Residuals are 0; counts are those of an unmasked layout.
  static Result<OnebitState> make(Engine& engine, const OnebitLayout& layout,
                                  const OnebitSettings& settings);

  // Binds the slots; the result and the new server residual go to the buffers that are not current.
  void bind(Run& run, const OnebitSlots& slots) const;
  void bind_current(Run& run, uint32_t bits_slot, uint32_t messages_slot) const;
  // What was bound as next becomes current: after a step that has committed, and only then.
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

  // A collective of `comm`: 8 bytes per element are exchanged. Zeros if there is no residual.
  Result<OnebitMean> mean(Comm& comm, const std::vector<uint8_t>* valid_bits) const;
  // INVALID_ARGUMENT: other sizes, values that are not finite, or no residual to restore.
  Status restore_mean(Engine& engine, const OnebitMean& mean);

  uint64_t bytes() const;

 private:
  bool onebit() const { return settings_.kind == CodecKind::kOnebit; }

  const OnebitLayout* layout_ = nullptr;
  OnebitSettings settings_;
  DeviceArray worker_, worker_scale_, worker_counts_, server_counts_;
  DeviceArray server_[2], server_scale_[2];
  DeviceArray bits_[2], messages_[2];
  int current_ = 0;
};

}  // namespace sotto
