// Gradients and the buckets that they are averaged in: the sections of a round.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/base/dtype.h"
#include "core/config/overlap.h"

namespace sotto {

struct OverlapTensor {
  uint64_t count = 0;
  Dtype dtype = Dtype::kF32;
  void* data = nullptr;  // where it is in every round; null: it moves from round to round

  uint64_t bytes() const { return count * dtype_bytes(dtype); }
};

// One input of a round's operation: it is complete when the last of its gradients is there.
struct OverlapBucket {
  std::vector<uint32_t> tensors;  // by dtype, then in launch order
  uint64_t bytes = 0;             // of gradients
};

// In launch order. A bucket ends with the gradient that makes it as long as the settings say, or
// longer. Every gradient is in one, also one without elements.
std::vector<OverlapBucket> cut_buckets(std::span<const OverlapTensor> tensors,
                                       const OverlapConfig& config);

}  // namespace sotto
