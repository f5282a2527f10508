// Direct reductions: every rank receives its chunk from all others, adds up, and may send the
// result to all.
//
// What the others send of a chunk are its rows. A whole chunk's rows are as large as the tensors,
// so a chunk is taken in windows: rows of a few windows are in memory (HeldWindows), and the
// receives of a window wait until the one whose place it takes has been added up. A window has
// whole segments, one of every rank at least, or, where messages are not cut, one message of each.
//
// Rounds (n windows): with several windows in memory the rows of the next one are on their way
// before the results of this one are, 2 n rounds in all. With one they have to wait for its sums
// anyway and go with its results, n + 1 rounds in all.
#pragma once

#include <cstdint>
#include <functional>

#include "core/base/dtype.h"
#include "core/plan/builder.h"
#include "core/plan/layout.h"

namespace sotto {

struct DirectReduce {
  PlanBuilder& b;
  int32_t rank;
  int32_t size;
  uint64_t element;  // bytes
  uint64_t segment;  // elements
  HeldWindows held;
  uint32_t round;  // first round; how many follow depends on the longest chunk
  std::function<Range(uint32_t rank)> chunk_of = nullptr;
  // This rank's part of a segment of another rank's chunk.
  std::function<Region(Range segment)> contribution = nullptr;
  // Adds up a segment of this rank's chunk. Row k of `rows` is what rank k sent; element 0 of a row
  // is element `base` of the flat space, rows are `stride` elements apart.
  std::function<void(Range segment, const OperandRef& rows, uint64_t base, uint64_t stride)>
      reduce = nullptr;
  // All-reduce: a reduced segment of this rank's chunk, and where those of others go. Null:
  // reduce-scatter.
  std::function<Region(Range segment)> reduced = nullptr;
  std::function<void(int32_t peer, Range segment, uint32_t round)> receive_reduced = nullptr;
  int32_t root = -1;  // the only rank that results are sent to; -1: all
};

// The windows of a reduction: elements of one rank's part of one, how many there are, and how many
// are in memory at a time. `chunk_of` is set.
struct WindowShape {
  uint64_t elements = 0;
  uint32_t count = 0;
  uint32_t held = 0;
};
WindowShape windows_of(const DirectReduce& direct);

void emit_direct_reduce(const DirectReduce& direct);

}  // namespace sotto
