#include "core/plan/one_level.h"

#include <algorithm>
#include <bit>
#include <map>

#include "core/plan/direct.h"
#include "core/plan/exchange.h"
#include "core/plan/native.h"
#include "core/plan/section.h"

namespace sotto {
namespace {

constexpr uint64_t kOneHopBytes = 64 * 1024;
constexpr uint64_t kTreeBytes = 256 * 1024;

void copy_tensors(Section& s, Range range) {
  for (const Piece& piece : s.pieces(range, range.begin)) {
    if (s.request.in_place[piece.tensor]) continue;
    s.b.copy({s.slots.out + piece.tensor, piece.target * s.element, piece.count * s.element},
             {s.slots.in + piece.tensor, piece.offset * s.element, piece.count * s.element});
  }
}

// Adds up a segment of this rank's own data and the rows of the others, into the output tensors.
void reduce_segment(Section& s, Range segment, const OperandRef& rows, uint64_t base,
                    uint64_t stride) {
  s.b.kernel<kernels::Reduce>(
      {.own = list(s.slots.in, Access::kRead, s.bits()),
       .rows = rows,
       .out = target(s.slots.out, Access::kWrite, s.bits())},
      s.pieces(segment, segment.begin),
      ReduceArgs{stride, base, 0, 0, s.dtype, s.ranks(), s.me(), s.request.reduce, false, false});
}

void emit_one_hop_all_reduce(Section& s) {
  const Range all{0, s.layout.size()};
  const Region own = contiguous(s, s.slots.in, all, false);
  for (int32_t peer : s.peers()) s.b.send(peer, own, s.round);
  const uint64_t row_bytes = all.count * s.element;
  OperandRef rows = flat(s.b.scratch(s.ranks() * row_bytes), Access::kRead, s.bits(), 0);
  rows.footprint = Footprint::kRows;
  rows.rows = s.ranks();
  rows.row_bytes = row_bytes;
  for (int32_t peer : s.peers()) {
    s.b.recv(peer, {rows.slot, static_cast<uint64_t>(peer) * row_bytes, row_bytes}, s.round);
  }
  reduce_segment(s, all, rows, 0, all.count);
}

// What direct reductions of a section have in common.
DirectReduce direct_reduce(Section& s) {
  DirectReduce d{.b = s.b,
                 .rank = s.request.rank,
                 .size = s.request.size,
                 .element = s.element,
                 .segment = s.segment,
                 .held = s.request.held,
                 .round = s.round};
  d.contribution = [&s](Range segment) { return contiguous(s, s.slots.in, segment, false); };
  d.reduce = [&s](Range segment, const OperandRef& rows, uint64_t base, uint64_t stride) {
    reduce_segment(s, segment, rows, base, stride);
  };
  return d;
}

void emit_direct_all_reduce(Section& s) {
  DirectReduce d = direct_reduce(s);
  d.chunk_of = [&s](uint32_t k) {
    return share_of(s.layout.size(), s.ranks(), k, kDenseChunkAlign);
  };
  d.reduced = [&s](Range segment) { return contiguous(s, s.slots.out, segment, true); };
  d.receive_reduced = [&s](int32_t peer, Range segment, uint32_t round) {
    receive_range(s, peer, s.slots.out, segment, true, round);
  };
  emit_direct_reduce(d);
}

void emit_all_reduce(Section& s) {
  const uint64_t bytes = s.layout.size() * s.element;
  if (s.request.size == 1) {
    copy_tensors(s, {0, s.layout.size()});
    return;
  }
  bytes*(s.ranks() - 1) <= kOneHopBytes ? emit_one_hop_all_reduce(s) : emit_direct_all_reduce(s);
}

// Every rank's part of the layout, which is by rank.
std::vector<Range> parts_of(const Section& s, const std::vector<uint32_t>& tensors) {
  if (s.request.kind == OpKind::kAllGatherParts)
    return ranges_of(s.request.out_parts, tensors, s.ranks());
  if (s.request.kind == OpKind::kReduceScatterParts)
    return ranges_of(s.request.in_parts, tensors, s.ranks());
  const uint64_t part = s.layout.size() / s.ranks();
  std::vector<Range> parts;
  for (uint32_t k = 0; k < s.ranks(); ++k) parts.push_back({k * part, part});
  return parts;
}

void emit_reduce_scatter(Section& s, const std::vector<Range>& parts) {
  if (s.request.size == 1) {
    copy_tensors(s, parts[0]);
    return;
  }
  DirectReduce d = direct_reduce(s);
  d.chunk_of = [&parts](uint32_t k) { return parts[k]; };
  emit_direct_reduce(d);
}

// Everything to the root, which adds up.
void emit_reduce_at_root(Section& s) {
  DirectReduce d = direct_reduce(s);
  d.chunk_of = [&s](uint32_t k) {
    return Range{0, static_cast<int32_t>(k) == s.request.root ? s.layout.size() : 0};
  };
  emit_direct_reduce(d);
}

// Every rank adds up its chunk. The root has its own in its tensors, the others keep the results of
// as many windows as there are rows of; those of a window may be sent all at once, as one group.
void emit_reduce_by_chunks(Section& s) {
  const auto chunk_of = [&s](uint32_t k) {
    return share_of(s.layout.size(), s.ranks(), k, kDenseChunkAlign);
  };
  DirectReduce d = direct_reduce(s);
  d.root = s.request.root;
  d.chunk_of = chunk_of;
  d.receive_reduced = [&s](int32_t peer, Range segment, uint32_t round) {
    receive_range(s, peer, s.slots.out, segment, true, round);
  };
  if (s.request.rank == s.request.root) {
    // Its own results are sent nowhere.
    d.reduced = [&s](Range) { return Region{s.slots.out, 0, 0}; };
    emit_direct_reduce(d);
    return;
  }
  const WindowShape windows = windows_of(d);
  const uint64_t first = chunk_of(s.me()).begin;
  const uint32_t results = s.b.scratch(windows.held * windows.elements * s.element);
  const auto place_of = [&](Range segment) {
    const uint64_t at = segment.begin - first;
    const uint64_t window = at / windows.elements % windows.held;
    return (window * windows.elements + at % windows.elements) * s.element;
  };
  d.reduced = [&](Range segment) {
    return Region{results, place_of(segment), segment.count * s.element};
  };
  d.reduce = [&](Range segment, const OperandRef& rows, uint64_t base, uint64_t stride) {
    s.b.kernel<kernels::Reduce>(
        {.own = list(s.slots.in, Access::kRead, s.bits()),
         .rows = rows,
         .out = flat(results, Access::kWrite, s.bits(), segment.begin, place_of(segment))},
        s.pieces(segment, segment.begin),
        ReduceArgs{stride, base, 0, segment.begin, s.dtype, s.ranks(), s.me(), s.request.reduce,
                   false, true});
  };
  emit_direct_reduce(d);
}

void emit_reduce(Section& s) {
  const uint64_t bytes = s.layout.size() * s.element;
  if (s.request.size == 1) {
    copy_tensors(s, {0, s.layout.size()});
    return;
  }
  const bool at_root = s.request.size == 2 || bytes * (s.ranks() - 1) <= kOneHopBytes;
  at_root ? emit_reduce_at_root(s) : emit_reduce_by_chunks(s);
}

// `offset` of the layout addresses the gathered tensor, `target` the part.
void emit_all_gather(Section& s, const std::vector<Range>& parts) {
  const Range mine = parts[s.me()];
  for (Range segment : segments_of(mine, s.segment)) {
    const Region own = contiguous(s, s.slots.in, segment, true);
    for (int32_t peer : s.peers()) s.b.send(peer, own, s.round);
  }
  for (int32_t peer : s.peers()) {
    for (Range segment : segments_of(parts[static_cast<size_t>(peer)], s.segment)) {
      receive_range(s, peer, s.slots.out, segment, false, s.round);
    }
  }
  for (const Piece& piece : s.pieces(mine, mine.begin)) {
    if (s.request.in_place[piece.tensor]) continue;
    s.b.copy({s.slots.out + piece.tensor, piece.offset * s.element, piece.count * s.element},
             {s.slots.in + piece.tensor, piece.target * s.element, piece.count * s.element});
  }
}

// Binomial tree around the root, which is rank 0 of `size`: rank v receives from v with its lowest
// set bit cleared, then serves v + bit for lower bits. A message over edge `bit` has round
// log2(width / bit): parents send before children pass on.
void emit_tree(Section& s, int32_t v, int32_t size) {
  const auto width = static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(size)));
  const auto rounds = [width](int32_t bit) {
    return static_cast<uint32_t>(std::countr_zero(static_cast<uint32_t>(width / bit)));
  };
  s.b.reserve_rounds(s.round + rounds(1) + 1);
  const Range all{0, s.layout.size()};
  const int32_t lowest = v == 0 ? width : v & -v;
  for (Range segment : segments_of(all, s.segment)) {
    if (v != 0) receive_range(s, v - lowest, s.slots.out, segment, true, s.round + rounds(lowest));
    if (lowest == 1) continue;
    const Region data = contiguous(s, v == 0 ? s.slots.in : s.slots.out, segment, false);
    for (int32_t bit = lowest / 2; bit > 0; bit /= 2) {
      if (v + bit < size) s.b.send(v + bit, data, s.round + rounds(bit));
    }
  }
}

// The ranks in a circle from the root on.
Status emit_tree_broadcast(Section& s) {
  RankGroup circle;
  for (int32_t i = 0; i < s.request.size; ++i)
    circle.push_back((s.request.root + i) % s.request.size);
  return s.b.within({&circle, 1}, s.request.rank, [&s](int32_t v, int32_t size) {
    emit_tree(s, v, size);
    return ok_status();
  });
}

void emit_scatter_broadcast(Section& s) {
  const int32_t root = s.request.root;
  const auto chunk_of = [&](int32_t k) {
    return share_of(s.layout.size(), s.ranks(), static_cast<uint32_t>(k), kDenseChunkAlign);
  };
  const bool is_root = s.request.rank == root;
  s.b.reserve_rounds(s.round + 2);
  if (is_root) {
    for (int32_t peer : s.peers()) {
      for (Range segment : segments_of(chunk_of(peer), s.segment)) {
        s.b.send(peer, contiguous(s, s.slots.in, segment, false), s.round);
      }
    }
  } else {
    for (Range segment : segments_of(chunk_of(s.request.rank), s.segment)) {
      receive_range(s, root, s.slots.out, segment, true, s.round);
    }
  }
  for (Range segment : segments_of(chunk_of(s.request.rank), s.segment)) {
    const Region data = contiguous(s, is_root ? s.slots.in : s.slots.out, segment, false);
    for (int32_t peer : s.peers()) {
      if (peer != root) s.b.send(peer, data, s.round + 1);
    }
  }
  if (is_root) return;
  for (int32_t peer : s.peers()) {
    for (Range segment : segments_of(chunk_of(peer), s.segment))
      receive_range(s, peer, s.slots.out, segment, true, s.round + 1);
  }
}

Status emit_broadcast(Section& s) {
  if (s.request.size == 2 || s.layout.size() * s.element <= kTreeBytes) {
    SOTTO_TRY(emit_tree_broadcast(s));
  } else if (s.request.size > 1) {
    emit_scatter_broadcast(s);
  }
  if (s.request.rank == s.request.root) copy_tensors(s, {0, s.layout.size()});
  return ok_status();
}

void emit_point_to_point(Section& s) {
  for (Range segment : segments_of({0, s.layout.size()}, s.segment)) {
    if (s.request.is_send) {
      s.b.send(s.request.peer, contiguous(s, s.slots.in, segment, false), s.round);
    } else {
      receive_range(s, s.request.peer, s.slots.out, segment, true, s.round);
    }
  }
}

FlatLayout layout_of(const CollectiveRequest& r, const std::vector<uint32_t>& tensors) {
  const auto ranks = static_cast<uint32_t>(r.size);
  if (r.kind == OpKind::kAllGatherParts)
    return FlatLayout::by_parts(r.out_parts, tensors, ranks, true);
  if (r.kind == OpKind::kReduceScatterParts)
    return FlatLayout::by_parts(r.in_parts, tensors, ranks, true);
  const bool by_rank =
      r.kind == OpKind::kReduceScatter || r.kind == OpKind::kAllGather ||
      ((r.kind == OpKind::kGather || r.kind == OpKind::kScatter) && r.rank == r.root);
  return by_rank ? FlatLayout::by_rank(r.counts, tensors, ranks)
                 : FlatLayout::concatenated(r.counts, tensors);
}

// A section begins in its round; those that take more of them reserve them.
Status emit_section(Section& s, const std::vector<uint32_t>& tensors) {
  if (s.b.of_all_ranks() && is_native(s, tensors)) {
    emit_native(s, tensors);
    return ok_status();
  }
  switch (s.request.kind) {
    case OpKind::kAllReduce: emit_all_reduce(s); break;
    case OpKind::kReduceScatterParts:
    case OpKind::kReduceScatter: emit_reduce_scatter(s, parts_of(s, tensors)); break;
    case OpKind::kAllGatherParts:
    case OpKind::kAllGather: emit_all_gather(s, parts_of(s, tensors)); break;
    case OpKind::kReduce: emit_reduce(s); break;
    case OpKind::kBroadcast: return emit_broadcast(s);
    case OpKind::kSendRecv: emit_point_to_point(s); break;
    case OpKind::kGather: emit_gather(s); break;
    case OpKind::kScatter: emit_scatter(s); break;
    default:
      return error(Code::kInternal, "operation kind {} has no builder",
                   static_cast<int>(s.request.kind));
  }
  return ok_status();
}

}  // namespace

void emit_barrier(PlanBuilder& b, int32_t rank, int32_t size, std::vector<uint32_t>& received) {
  const uint32_t nothing = b.scratch(0);
  uint32_t round = b.next_round();
  for (int32_t step = 1; step < size; step *= 2, ++round) {
    const uint32_t send = b.steps();
    b.send((rank + step) % size, {nothing, 0, 0}, round, MessageClass::kMetadata);
    for (const uint32_t earlier : received) b.order(send, earlier);
    received.push_back(b.steps());
    b.recv((rank - step + size) % size, {nothing, 0, 0}, round, MessageClass::kMetadata);
  }
}

Status emit_one_level(PlanBuilder& b, const CollectiveRequest& request,
                      const CollectiveSlots& slots) {
  if (request.kind == OpKind::kBarrier) {
    std::vector<uint32_t> received;
    emit_barrier(b, request.rank, request.size, received);
    return ok_status();
  }
  std::map<Dtype, std::vector<uint32_t>> by_dtype;
  for (uint32_t i = 0; i < request.counts.size(); ++i) by_dtype[request.dtypes[i]].push_back(i);
  if (request.kind == OpKind::kAllToAll || request.kind == OpKind::kAllToAllParts) {
    emit_all_to_all(b, request, slots, by_dtype);
    return ok_status();
  }
  // Sections of point to point, gather and scatter share a round: there is no order between them.
  const bool shared = request.kind == OpKind::kSendRecv || request.kind == OpKind::kGather ||
                      request.kind == OpKind::kScatter;
  const uint32_t first = b.next_round();
  for (const auto& [dtype, tensors] : by_dtype) {
    FlatLayout layout = layout_of(request, tensors);
    if (layout.size() == 0) continue;
    const uint64_t element = dtype_bytes(dtype);
    Section s{b,
              request,
              slots,
              std::move(layout),
              dtype,
              element,
              segment_elements(request.segment_bytes, static_cast<uint32_t>(element * 8)),
              shared ? first : b.next_round()};
    b.reserve_rounds(s.round + 1);
    SOTTO_TRY(emit_section(s, tensors));
  }
  return ok_status();
}

}  // namespace sotto
