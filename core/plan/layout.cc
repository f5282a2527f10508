#include "core/plan/layout.h"

#include <algorithm>

namespace sotto {

void FlatLayout::append(uint32_t tensor, uint64_t offset, uint64_t target, uint64_t count) {
  if (count == 0) return;
  spans_.push_back({size_, offset, target, count, tensor});
  size_ += count;
}

FlatLayout FlatLayout::concatenated(std::span<const uint64_t> counts,
                                    std::span<const uint32_t> tensors) {
  FlatLayout layout;
  for (uint32_t t : tensors) layout.append(t, 0, 0, counts[t]);
  return layout;
}

FlatLayout FlatLayout::by_rank(std::span<const uint64_t> part_counts,
                               std::span<const uint32_t> tensors, uint32_t ranks) {
  FlatLayout layout;
  for (uint32_t k = 0; k < ranks; ++k) {
    for (uint32_t t : tensors) layout.append(t, k * part_counts[t], 0, part_counts[t]);
  }
  return layout;
}

FlatLayout FlatLayout::by_parts(std::span<const Range> parts, std::span<const uint32_t> tensors,
                                uint32_t ranks, bool target_in_part) {
  FlatLayout layout;
  for (uint32_t k = 0; k < ranks; ++k) {
    for (uint32_t t : tensors) {
      const Range& part = parts[uint64_t{t} * ranks + k];
      layout.append(t, part.begin, target_in_part ? 0 : part.begin, part.count);
    }
  }
  return layout;
}

size_t FlatLayout::span_at(uint64_t flat) const {
  const auto it = std::upper_bound(spans_.begin(), spans_.end(), flat,
                                   [](uint64_t f, const Span& span) { return f < span.flat; });
  return static_cast<size_t>(it - spans_.begin()) - 1;
}

std::vector<Piece> FlatLayout::pieces(Range range, uint64_t origin, uint64_t first_block) const {
  std::vector<Piece> out;
  if (range.count == 0) return out;
  for (size_t s = span_at(range.begin); s < spans_.size() && spans_[s].flat < range.end(); ++s) {
    const Span& span = spans_[s];
    const uint64_t begin = std::max(range.begin, span.flat);
    const uint64_t end = std::min(range.end(), span.flat + span.count);
    Piece piece;
    piece.flat = begin;
    piece.offset = span.offset + (begin - span.flat);
    piece.target = span.target + (begin - span.flat);
    piece.count = end - begin;
    piece.block = first_block + (begin - origin) / kNormBlock;
    piece.lane = static_cast<uint32_t>((begin - origin) % kNormBlock);
    piece.tensor = span.tensor;
    out.push_back(piece);
  }
  return out;
}

const FlatLayout::Span* FlatLayout::single(Range range) const {
  if (range.count == 0 || spans_.empty()) return nullptr;
  const Span& span = spans_[span_at(range.begin)];
  return range.end() <= span.flat + span.count ? &span : nullptr;
}

Range share_of(uint64_t n, uint32_t ranks, uint32_t k, uint64_t align) {
  const uint64_t units = (n + align - 1) / align;
  const uint64_t base = units / ranks;
  const uint64_t extra = units % ranks;
  const uint64_t first = k * base + std::min<uint64_t>(k, extra);
  const uint64_t last = first + base + (k < extra ? 1 : 0);
  const uint64_t begin = std::min(n, first * align);
  return {begin, std::min(n, last * align) - begin};
}

std::vector<Range> segments_of(Range range, uint64_t segment) {
  std::vector<Range> out;
  for (uint64_t at = range.begin; at < range.end(); at += segment) {
    out.push_back({at, std::min(segment, range.end() - at)});
  }
  return out;
}

uint64_t segment_elements(uint64_t bytes, uint32_t bits) {
  if (bytes == 0) return kUncut;
  const uint64_t elements = bytes * 8 / bits;
  return std::max(kNormBlock, elements / kNormBlock * kNormBlock);
}

}  // namespace sotto
