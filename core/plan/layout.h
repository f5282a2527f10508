// How several tensors form one flat space of elements that is cut into chunks, segments and pieces.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/base/dtype.h"
#include "core/kernels/call.h"

namespace sotto {

struct Range {
  uint64_t begin = 0;
  uint64_t count = 0;
  uint64_t end() const { return begin + count; }
  bool operator==(const Range&) const = default;
};

class FlatLayout {
 public:
  struct Span {
    uint64_t flat = 0;
    uint64_t offset = 0;  // first element in the tensor
    uint64_t target = 0;  // first element in the output tensor
    uint64_t count = 0;
    uint32_t tensor = 0;
  };

  // The tensors one after the other; `tensors` lists their indices, counts is indexed by tensor.
  static FlatLayout concatenated(std::span<const uint64_t> counts,
                                 std::span<const uint32_t> tensors);
  // For every rank k in turn, part k of every tensor: a tensor of `ranks * part_counts[t]` elements
  // has its part k at k * part_counts[t]. target is the index within the part.
  static FlatLayout by_rank(std::span<const uint64_t> part_counts,
                            std::span<const uint32_t> tensors, uint32_t ranks);

  // For every rank k in turn, its part of every tensor: parts[t * ranks + k]. target is offset, or
  // the index within the part.
  static FlatLayout by_parts(std::span<const Range> parts, std::span<const uint32_t> tensors,
                             uint32_t ranks, bool target_in_part = false);

  uint64_t size() const { return size_; }
  const std::vector<Span>& spans() const { return spans_; }
  // Pieces that cover a range; norm blocks are counted from `origin` (an element at or before
  // range.begin), the first being number `first_block`.
  std::vector<Piece> pieces(Range range, uint64_t origin, uint64_t first_block = 0) const;
  // The one span that covers the whole range, or null.
  const Span* single(Range range) const;

 private:
  void append(uint32_t tensor, uint64_t offset, uint64_t target, uint64_t count);
  size_t span_at(uint64_t flat) const;

  std::vector<Span> spans_;
  uint64_t size_ = 0;
};

// Rank k's share of n elements: as even as possible, borders on multiples of `align` elements.
Range share_of(uint64_t n, uint32_t ranks, uint32_t k, uint64_t align);

// Cuts a range every `segment` elements from its begin.
std::vector<Range> segments_of(Range range, uint64_t segment);

// Elements of a segment where messages are not cut: more than any range has.
inline constexpr uint64_t kUncut = uint64_t{1} << 62;
// Elements of one wire segment: `bytes` of `bits`-bit elements, rounded down to norm blocks, at
// least one block. No bytes: kUncut.
uint64_t segment_elements(uint64_t bytes, uint32_t bits);

}  // namespace sotto
