// Where the gradients of a round lie that are averaged in place: none in memory of another.
//
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <map>
#include <span>

#include "core/base/status.h"
#include "core/overlap/buckets.h"

namespace sotto {

class RoundPlaces {
 public:
  void clear() { taken_.clear(); }
  // memory: of each of `indices`. INVALID_ARGUMENT names the gradient that lies there already; then
  // none has been taken.
  Status take(std::span<const uint64_t> indices, std::span<void* const> memory,
              std::span<const OverlapTensor> tensors);
  void give_back(std::span<const uint64_t> indices);

 private:
  struct Taken {
    uintptr_t end = 0;
    uint64_t gradient = 0;
  };
  std::map<uintptr_t, Taken> taken_;  // by the first byte
};

}  // namespace sotto
