#include "core/plan/flat_reduce.h"

#include <algorithm>

#include "core/plan/direct.h"
#include "core/plan/native.h"

namespace sotto {
namespace {

struct FlatReduce {
  PlanBuilder& b;
  const FlatReduceRequest& r;
  uint64_t element = dtype_bytes(r.dtype);

  uint32_t bits() const { return static_cast<uint32_t>(element * 8); }
  uint32_t ranks() const { return static_cast<uint32_t>(r.size); }
  uint64_t segment() const { return segment_elements(r.segment_bytes, bits()); }
  Region result(Range range) const {
    return {r.out_flat, range.begin * element, range.count * element};
  }
  void pack(Range range, Region to) const {
    b.kernel<kernels::Pack>({.tensors = list(r.in_list, Access::kRead, bits()),
                             .flat = flat(to.slot, Access::kWrite, bits(), range.begin, to.offset)},
                            r.layout->pieces(range, range.begin),
                            PackArgs{range.begin, static_cast<uint32_t>(element)});
  }
  // What is sent of a range: the tensor itself, or a packed copy.
  Region contribution(Range range) const {
    if (r.in_place) return result(range);
    if (const FlatLayout::Span* span = r.layout->single(range)) {
      return {r.in_list + span->tensor, (span->offset + range.begin - span->flat) * element,
              range.count * element};
    }
    const Region packed = packs_in_place(r)
                              ? result(range)
                              : Region{b.scratch(range.count * element), 0, range.count * element};
    pack(range, packed);
    return packed;
  }
  OperandRef flags() const {
    return r.flags == kNoSlot ? absent() : whole(r.flags, Access::kReadWrite, 0, 4);
  }
};

bool is_native(const FlatReduceRequest& r) {
  const NativeCollectives sums = native_needs(OpKind::kReduceScatter, r.op, r.dtype);
  const NativeCollectives needed = sums | native_needs(OpKind::kAllGather, r.op, r.dtype);
  return r.size > 1 && r.group == 0 && sums != 0 && (r.native & needed) == needed;
}

// Elements of a rank's share of a native one.
uint64_t native_share(const FlatReduceRequest& r) {
  const uint64_t unit = kDenseChunkAlign * static_cast<uint64_t>(r.size);
  return (r.layout->size() + unit - 1) / unit * kDenseChunkAlign;
}

// Raises the flags if this rank's share, which the transport has added up, is not finite: the sum
// of one rank. It writes what is there.
void flag_nonfinite(const FlatReduce& f, Range share) {
  const FlatReduceRequest& r = f.r;
  const uint32_t no_rows = f.b.scratch(1);
  f.b.kernel<kernels::Reduce>({.own = flat(r.out_flat, Access::kRead, f.bits()),
                               .rows = whole(no_rows, Access::kRead, 0, 0),
                               .out = flat(r.out_flat, Access::kWrite, f.bits()),
                               .flags = f.flags()},
                              r.layout->pieces(share, share.begin),
                              ReduceArgs{0, 0, 0, 0, r.dtype, 1, 0, ReduceOp::kSum, true, true});
}

void emit_native_calls(const FlatReduce& f) {
  const FlatReduceRequest& r = f.r;
  const uint64_t n = r.layout->size(), share = native_share(r);
  if (n == 0) return;
  if (!r.in_place) f.pack({0, n}, f.result({0, n}));
  const Range padding{n, share * f.ranks() - n};
  if (padding.count != 0) f.b.fill(f.result(padding), 0);
  const uint64_t begin = share * static_cast<uint64_t>(r.rank);
  const uint32_t mine = f.b.scratch(share * f.element);
  f.b.alias(mine, r.out_flat, begin * f.element);
  CollectiveRequest request;
  request.kind = OpKind::kReduceScatter;
  request.rank = r.rank;
  request.size = r.size;
  request.reduce = r.op;
  request.counts = {share};
  const auto call = [&](CollectiveSlots slots, uint32_t round) {
    Section s{f.b, request, slots, {}, r.dtype, f.element, f.segment(), round};
    emit_native(s, {0});
  };
  f.b.stage(Stage::kScatter);
  call({r.out_flat, mine}, r.round);
  request.kind = OpKind::kAllGather;
  f.b.stage(Stage::kGather);
  call({mine, r.out_flat}, r.round + 1);
  f.b.stage(Stage::kOther);
  const Range valid{std::min(n, begin), std::min(n, begin + share) - std::min(n, begin)};
  if (r.flags != kNoSlot && valid.count != 0) flag_nonfinite(f, valid);
}

void emit_messages(const FlatReduce& f) {
  const FlatReduceRequest& r = f.r;
  DirectReduce d{.b = f.b,
                 .rank = r.rank,
                 .size = r.size,
                 .element = f.element,
                 .segment = f.segment(),
                 .held = r.held,
                 .round = r.round};
  d.chunk_of = [&](uint32_t k) {
    return share_of(r.layout->size(), f.ranks(), k, kDenseChunkAlign);
  };
  d.contribution = [&](Range range) { return f.contribution(range); };
  d.reduce = [&](Range range, const OperandRef& rows, uint64_t base, uint64_t stride) {
    f.b.kernel<kernels::Reduce>(
        {.own = list(r.in_list, Access::kRead, f.bits()),
         .rows = rows,
         .out = flat(r.out_flat, Access::kWrite, f.bits()),
         .flags = f.flags()},
        r.layout->pieces(range, range.begin),
        ReduceArgs{stride, base, 0, 0, r.dtype, f.ranks(), static_cast<uint32_t>(r.rank), r.op,
                   false, true, r.group});
  };
  d.reduced = [&](Range range) { return f.result(range); };
  d.receive_reduced = [&](int32_t peer, Range range, uint32_t round) {
    f.b.recv(peer, f.result(range), round);
  };
  emit_direct_reduce(d);
}

}  // namespace

uint64_t flat_reduce_bytes(const FlatReduceRequest& r) {
  const uint64_t ranks = static_cast<uint64_t>(r.size);
  return (is_native(r) ? native_share(r) * ranks : r.layout->size()) * dtype_bytes(r.dtype);
}

bool packs_in_place(const FlatReduceRequest& r) { return is_native(r) || r.segment_bytes == 0; }

void emit_flat_all_reduce(PlanBuilder& b, const FlatReduceRequest& r) {
  const FlatReduce f{b, r};
  is_native(r) ? emit_native_calls(f) : emit_messages(f);
}

}  // namespace sotto
