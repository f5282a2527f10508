// Gradients and the buckets that they are averaged in: the sections of a round.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/status.h"
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

// Gradients in the order in which they are put into buckets. That of kObserved is not known yet: as
// kReversed.
std::vector<uint32_t> launch_order(uint64_t tensors, OverlapOrder order);

// In launch order. A bucket ends with the gradient that makes it as long as the settings say, or
// longer. order: every gradient once, also those without elements.
std::vector<OverlapBucket> cut_buckets(std::span<const OverlapTensor> tensors,
                                       std::span<const uint32_t> order,
                                       const OverlapConfig& config);

// Buckets with these gradients. INVALID_ARGUMENT: not every gradient is in one of them, once.
Result<std::vector<OverlapBucket>> buckets_of(std::span<const OverlapTensor> tensors,
                                              std::span<const std::vector<uint32_t>> lists);

}  // namespace sotto
