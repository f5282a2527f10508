// Which gradients of a round are there.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/base/status.h"
#include "core/overlap/buckets.h"

namespace sotto {

// Threads: one at a time.
class RoundMarks {
 public:
  RoundMarks(std::span<const OverlapBucket> buckets, uint64_t tensors);

  // A round begins: nothing is there.
  void reset();
  // Takes gradients that are missing, all or none: they are missing no more, and not there yet.
  // INVALID_ARGUMENT: no such gradient; INVALID_STATE: one was taken before, or is named twice.
  // `round` is for texts.
  Status claim(std::span<const uint64_t> indices, uint64_t round);
  // They are missing again.
  void give_up(std::span<const uint64_t> indices);
  // A gradient that was claimed is there. The bucket that is complete with it, if that is so.
  std::optional<uint32_t> mark(uint64_t index);

  uint32_t bucket_of(uint64_t index) const { return bucket_of_[index]; }
  uint64_t missing() const { return missing_; }
  std::vector<uint64_t> missing_ones() const;
  // Those that are not missing, in the order of the claims.
  const std::vector<uint32_t>& order() const { return order_; }

 private:
  enum class Mark : uint8_t { kMissing, kClaimed, kThere };

  std::vector<uint32_t> bucket_of_;  // by gradient
  std::vector<uint32_t> sizes_;      // by bucket
  std::vector<uint32_t> left_;       // by bucket: gradients that are not there
  std::vector<Mark> marks_;          // by gradient
  std::vector<uint32_t> order_;
  uint64_t missing_ = 0;
};

}  // namespace sotto
