#include "core/codec/host_mean.h"

#include <algorithm>
#include <utility>

#include "core/plan/collectives.h"

namespace sotto {

HostMean::HostMean(PlanBuilder& b, const CompressedRequest& r) : b_(b), r_(r) {
  const std::vector<LayoutTensor>& tensors = r.layout->tensors();
  uint64_t elements = 0;
  for (const LayoutTensor& t : tensors) elements += t.count;
  const uint32_t values = b.scratch(std::max<uint64_t>(1, elements * 4));
  uint64_t at = 0;
  for (const LayoutTensor& t : tensors) {
    const uint32_t slot = b.scratch(t.count * 4);
    if (list_ == kNoSlot) list_ = slot;
    b.alias(slot, values, at * 4);
    at += t.count;
  }
}

// In a section a tensor is contiguous, and so is its part of every shard.
HostMean::Parts HostMean::parts_of(uint32_t section) const {
  const CompressedLayout& layout = *r_.layout;
  const auto tensors = static_cast<uint32_t>(layout.tensors().size());
  const uint32_t ranks = r_.levels->per_host();
  std::vector<Range> all(size_t{tensors} * ranks);
  uint32_t first = tensors, last = 0;
  for (uint32_t k = 0; k < layout.servers(); ++k) {
    for (const LayoutSegment& run : layout.segments(section, k, kUncut)) {
      const std::vector<Piece> pieces = layout.worker_pieces(k, run);
      if (r_.late != nullptr) r_.late->need(pieces);
      for (const Piece& piece : pieces) {
        if (piece.tensor >= tensors) continue;
        Range& part = all[size_t{piece.tensor} * ranks + k / layout.servers_per_shard()];
        if (part.count == 0) part.begin = piece.offset;
        part.count += piece.count;
        first = std::min(first, piece.tensor);
        last = std::max(last, piece.tensor + 1);
      }
    }
  }
  Parts parts;
  parts.first = first;
  for (uint32_t t = first; t < last; ++t) {
    uint64_t count = 0;
    for (uint32_t k = 0; k < ranks; ++k) {
      parts.ranges.push_back(all[size_t{t} * ranks + k]);
      count += parts.ranges.back().count;
    }
    parts.counts.push_back(count);
  }
  return parts;
}

void HostMean::emit(uint32_t section) {
  const Parts parts = parts_of(section);
  if (parts.counts.empty()) return;
  const size_t ranks = r_.levels->per_host();
  const size_t local = r_.levels->shard_of(r_.rank);
  CollectiveRequest request;
  request.kind = OpKind::kReduceScatterParts;
  request.reduce = ReduceOp::kMean;
  request.segment_bytes = r_.segment_bytes;
  request.in_parts = parts.ranges;
  CollectiveSlots slots{r_.host_in + parts.first, kNoSlot};
  for (size_t t = 0; t < parts.counts.size(); ++t) {
    const Range& mine = parts.ranges[t * ranks + local];
    request.counts.push_back(parts.counts[t]);
    request.dtypes.push_back(Dtype::kF32);
    request.in_place.push_back(0);
    const uint32_t slot = b_.scratch(mine.count * 4);
    if (slots.out == kNoSlot) slots.out = slot;
    b_.alias(slot, list_ + parts.first + static_cast<uint32_t>(t), mine.begin * 4);
  }
  // It fails for kinds alone that have no builder.
  (void)b_.within(r_.levels->hosts, r_.rank, [&](int32_t rank, int32_t size) {
    request.rank = rank;
    request.size = size;
    return emit_collective(b_, request, slots);
  });
}

}  // namespace sotto
