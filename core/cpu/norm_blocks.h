// Sums and maxima over norm blocks (core/kernels/call.h): the one place that knows their order.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/kernels/call.h"

namespace sotto {

// The 64 lanes of one block at a time. Every block that was opened gets its sum, 0 if nothing was
// added.
class NormBlocks {
 public:
  // sums null: nothing is kept.
  explicit NormBlocks(float* sums) : sums_(sums) {}

  // The lanes of `block`; finishes the block before it unless it is the same. Add element at
  // position p to lane p % 64, in ascending order of p.
  float* open(uint64_t block) {
    if (open_ && block == block_) return lanes_;
    finish();
    std::memset(lanes_, 0, sizeof lanes_);
    block_ = block;
    open_ = true;
    return lanes_;
  }

  void finish() {
    if (!open_) return;
    for (uint64_t half = kNormLanes / 2; half != 0; half /= 2) {
      for (uint64_t j = 0; j < half; ++j) lanes_[j] += lanes_[j + half];
    }
    if (sums_ != nullptr) sums_[block_] = lanes_[0];
    open_ = false;
  }

 private:
  alignas(128) float lanes_[kNormLanes];
  float* sums_;
  uint64_t block_ = 0;
  bool open_ = false;
};

// Maximum of values >= 0 of one block at a time; 0 if there is none. NaN takes no part.
class BlockMaxima {
 public:
  explicit BlockMaxima(float* maxima) : maxima_(maxima) {}

  float* open(uint64_t block) {
    if (!open_ || block != block_) {
      finish();
      best_ = 0;
      block_ = block;
      open_ = true;
    }
    return &best_;
  }

  void finish() {
    if (open_) maxima_[block_] = best_;
    open_ = false;
  }

 private:
  float* maxima_;
  float best_ = 0;
  uint64_t block_ = 0;
  bool open_ = false;
};

// Block sums added in float64, in ascending order.
inline double add_blocks(const float* sums, uint64_t first, uint64_t count) {
  double total = 0;
  for (uint64_t b = 0; b < count; ++b) total += sums[first + b];
  return total;
}

}  // namespace sotto
