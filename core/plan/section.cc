#include "core/plan/section.h"

#include <utility>

namespace sotto {

std::vector<Range> ranges_of(const std::vector<Range>& parts, const std::vector<uint32_t>& tensors,
                             size_t ranks) {
  std::vector<Range> ranges;
  uint64_t at = 0;
  for (size_t k = 0; k < ranks; ++k) {
    uint64_t count = 0;
    for (uint32_t t : tensors) count += parts[t * ranks + k].count;
    ranges.push_back({at, count});
    at += count;
  }
  return ranges;
}

Region contiguous(Section& s, uint32_t list_slot, Range range, bool use_target, bool copied) {
  const FlatLayout::Span* span = s.layout.single(range);
  if (span != nullptr && !copied) {
    const uint64_t first = (use_target ? span->target : span->offset) + (range.begin - span->flat);
    return {list_slot + span->tensor, first * s.element, range.count * s.element};
  }
  const uint32_t packed = s.b.scratch(range.count * s.element);
  std::vector<Piece> pieces = s.pieces(range, range.begin);
  if (use_target) {
    for (Piece& piece : pieces) piece.offset = piece.target;
  }
  s.b.kernel<kernels::Pack>({.tensors = list(list_slot, Access::kRead, s.bits()),
                             .flat = flat(packed, Access::kWrite, s.bits(), range.begin)},
                            std::move(pieces),
                            PackArgs{range.begin, static_cast<uint32_t>(s.element)});
  return {packed, 0, range.count * s.element};
}

void receive_range(Section& s, int32_t peer, uint32_t list_slot, Range range, bool use_target,
                   uint32_t round) {
  if (const FlatLayout::Span* span = s.layout.single(range)) {
    const uint64_t first = (use_target ? span->target : span->offset) + (range.begin - span->flat);
    s.b.recv(peer, {list_slot + span->tensor, first * s.element, range.count * s.element}, round);
    return;
  }
  const uint32_t packed = s.b.scratch(range.count * s.element);
  s.b.recv(peer, {packed, 0, range.count * s.element}, round);
  std::vector<Piece> pieces = s.pieces(range, range.begin);
  for (Piece& piece : pieces) {
    if (!use_target) piece.target = piece.offset;
  }
  s.b.kernel<kernels::Unpack>({.flat = flat(packed, Access::kRead, s.bits(), range.begin),
                               .tensors = target(list_slot, Access::kWrite, s.bits())},
                              std::move(pieces),
                              PackArgs{range.begin, static_cast<uint32_t>(s.element)});
}

}  // namespace sotto
