#include "core/plan/flat_reduce.h"

#include <algorithm>
#include <utility>

#include "core/plan/collectives.h"
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

bool has_levels(const FlatReduceRequest& r) { return r.levels != nullptr && r.levels->several(); }

bool is_native(const FlatReduceRequest& r) {
  if (has_levels(r)) return false;
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

// A direct reduction of a range by ranks of the comm. summands: in the tensors, or in out_flat,
// where results go. It raises the flags if there are any.
enum class Summands { kTensors, kFlat };
DirectReduce direct_reduce(const FlatReduce& f, int32_t rank, int32_t size, Range range,
                           Summands summands, OperandRef flags) {
  const bool in_flat = summands == Summands::kFlat;
  const auto ranks = static_cast<uint32_t>(size);
  DirectReduce d{.b = f.b,
                 .rank = rank,
                 .size = size,
                 .element = f.element,
                 .segment = f.segment(),
                 .held = f.r.held,
                 .round = f.b.next_round()};
  d.chunk_of = [range, ranks](uint32_t k) {
    const Range share = share_of(range.count, ranks, k, kDenseChunkAlign);
    return Range{range.begin + share.begin, share.count};
  };
  d.contribution = [&f, in_flat](Range part) {
    return in_flat ? f.result(part) : f.contribution(part);
  };
  d.reduce = [&f, rank, ranks, in_flat, flags](Range part, const OperandRef& rows, uint64_t base,
                                               uint64_t stride) {
    const FlatReduceRequest& r = f.r;
    f.b.kernel<kernels::Reduce>(
        {.own = in_flat ? flat(r.out_flat, Access::kRead, f.bits())
                        : list(r.in_list, Access::kRead, f.bits()),
         .rows = rows,
         .out = flat(r.out_flat, Access::kWrite, f.bits()),
         .flags = flags},
        r.layout->pieces(part, part.begin),
        ReduceArgs{stride, base, 0, 0, r.dtype, ranks, static_cast<uint32_t>(rank), r.op, in_flat,
                   true, r.group});
  };
  return d;
}

// The results go to the root, if there is one, or to all.
void emit_with_results(const FlatReduce& f, DirectReduce d) {
  d.reduced = [&f](Range part) { return f.result(part); };
  d.receive_reduced = [&f](int32_t peer, Range part, uint32_t round) {
    f.b.recv(peer, f.result(part), round);
  };
  emit_direct_reduce(d);
}

void emit_messages(const FlatReduce& f) {
  const Range all{0, f.r.layout->size()};
  emit_with_results(f, direct_reduce(f, f.r.rank, f.r.size, all, Summands::kTensors, f.flags()));
}

Range shard_of(const FlatReduce& f, uint32_t shard) {
  return share_of(f.r.layout->size(), f.r.levels->shards(), shard, kDenseChunkAlign);
}

// Inside a host: its shards to all of its ranks.
Status emit_shards(const FlatReduce& f, int32_t rank, int32_t size) {
  CollectiveRequest request;
  request.kind = OpKind::kBroadcast;
  request.rank = rank;
  request.size = size;
  request.counts = {f.r.layout->size()};
  request.dtypes = {f.r.dtype};
  request.in_place = {1};
  request.segment_bytes = f.r.segment_bytes;
  request.held = f.r.held;
  CollectiveSlots slots{f.r.out_flat, f.r.out_flat};
  if (f.r.levels->shards() > 1) {
    request.kind = OpKind::kAllGatherParts;
    for (uint32_t k = 0; k < f.r.levels->shards(); ++k) request.out_parts.push_back(shard_of(f, k));
    const Region mine = f.result(request.out_parts[static_cast<size_t>(rank)]);
    slots.in = f.b.scratch(mine.bytes);
    f.b.alias(slots.in, mine.slot, mine.offset);
  }
  return emit_collective(f.b, request, slots);
}

Status emit_levels(const FlatReduce& f) {
  const FlatReduceRequest& r = f.r;
  const Levels& levels = *r.levels;
  // What is not finite inside a host is not finite in the end.
  SOTTO_TRY(f.b.within(levels.hosts, r.rank, [&](int32_t rank, int32_t size) {
    DirectReduce d =
        direct_reduce(f, rank, size, {0, r.layout->size()}, Summands::kTensors, absent());
    if (levels.shards() > 1) {
      emit_direct_reduce(d);
    } else {
      d.root = 0;
      emit_with_results(f, std::move(d));
    }
    return ok_status();
  }));
  SOTTO_TRY(within_columns(f.b, levels, r.rank, [&](uint32_t shard, int32_t rank, int32_t size) {
    emit_with_results(f,
                      direct_reduce(f, rank, size, shard_of(f, shard), Summands::kFlat, f.flags()));
    return ok_status();
  }));
  return f.b.within(levels.hosts, r.rank, [&](int32_t rank, int32_t size) {
    f.b.stage(Stage::kGather);
    const Status status = emit_shards(f, rank, size);
    f.b.stage(Stage::kOther);
    return status;
  });
}

}  // namespace

uint64_t flat_reduce_bytes(const FlatReduceRequest& r) {
  const uint64_t ranks = static_cast<uint64_t>(r.size);
  return (is_native(r) ? native_share(r) * ranks : r.layout->size()) * dtype_bytes(r.dtype);
}

bool packs_in_place(const FlatReduceRequest& r) { return is_native(r) || r.segment_bytes == 0; }

void emit_flat_all_reduce(PlanBuilder& b, const FlatReduceRequest& r) {
  const FlatReduce f{b, r};
  b.reserve_rounds(r.round);
  if (has_levels(r)) {
    (void)emit_levels(f);  // kinds of collectives that there are
  } else {
    is_native(r) ? emit_native_calls(f) : emit_messages(f);
  }
}

}  // namespace sotto
