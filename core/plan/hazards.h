// Which earlier steps a step has to wait for, from the byte ranges both touch: a read waits for the
// last write, a write for the last write and all reads since.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "core/plan/plan.h"

namespace sotto {

class Hazards {
 public:
  explicit Hazards(size_t slots) : slots_(slots) {}

  // Records that `step` touches the region and appends the steps it must wait for (unsorted, may
  // repeat).
  void touch(uint32_t step, const Use& use, std::vector<uint32_t>* waits);

 private:
  struct Range {
    uint64_t end = 0;
    uint32_t writer = kNoStep;
    std::vector<uint32_t> readers;
  };
  using Ranges = std::map<uint64_t, Range>;  // begin -> range; disjoint

  static void split_at(Ranges& ranges, uint64_t position);
  static void fill_gaps(Ranges& ranges, uint64_t begin, uint64_t end);

  std::vector<Ranges> slots_;
};

}  // namespace sotto
