#include "core/plan/collectives.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/plan/one_level.h"
#include "core/plan/two_level.h"

namespace sotto {
namespace {

// Elements of a tensor that the parts of all ranks reach to.
uint64_t reach_of(const std::vector<Range>& parts, size_t tensor, size_t ranks) {
  uint64_t end = 0;
  for (size_t k = 0; k < ranks; ++k) {
    const Range& part = parts[tensor * ranks + k];
    if (part.count != 0) end = std::max(end, part.end());
  }
  return end;
}

// Elements of `in` and `out` of a tensor on this rank.
std::pair<uint64_t, uint64_t> elements_of(const CollectiveRequest& r, size_t t) {
  const auto size = static_cast<uint64_t>(r.size);
  const uint64_t part = r.counts[t];
  const uint64_t at_root = r.rank == r.root ? part * size : 0;
  switch (r.kind) {
    case OpKind::kReduceScatter: return {part * size, part};
    case OpKind::kAllGather: return {part, part * size};
    case OpKind::kGather: return {part, at_root};
    case OpKind::kScatter: return {at_root, part};
    case OpKind::kReduce: return {part, r.rank == r.root ? part : 0};
    case OpKind::kAllGatherParts:
      return {r.out_parts[t * size + static_cast<size_t>(r.rank)].count,
              reach_of(r.out_parts, t, size)};
    case OpKind::kReduceScatterParts:
      return {reach_of(r.in_parts, t, size),
              r.in_parts[t * size + static_cast<size_t>(r.rank)].count};
    case OpKind::kAllToAll: return {part * size, part * size};
    case OpKind::kAllToAllParts:
      return {reach_of(r.in_parts, t, size), reach_of(r.out_parts, t, size)};
    default: return {part, part};
  }
}

// This rank has the input (gather, reduce) or the output (scatter) alone.
bool one_sided(const CollectiveRequest& r) {
  return (r.kind == OpKind::kGather || r.kind == OpKind::kScatter || r.kind == OpKind::kReduce) &&
         r.rank != r.root;
}

CollectiveSlots add_slots(PlanBuilder& b, const CollectiveRequest& r) {
  std::vector<uint64_t> in, out;
  for (size_t i = 0; i < r.counts.size(); ++i) {
    const auto [in_count, out_count] = elements_of(r, i);
    in.push_back(in_count * dtype_bytes(r.dtypes[i]));
    out.push_back(out_count * dtype_bytes(r.dtypes[i]));
  }
  CollectiveSlots slots{b.bound_list(in), b.bound_list(out)};
  for (uint32_t i = 0; i < r.counts.size(); ++i) {
    if (!r.in_place[i] || one_sided(r)) continue;
    const uint64_t element = dtype_bytes(r.dtypes[i]);
    const uint64_t part = r.counts[i] * element * r.rank;
    const size_t mine = size_t{i} * static_cast<size_t>(r.size) + static_cast<size_t>(r.rank);
    switch (r.kind) {
      case OpKind::kReduceScatterParts:
        b.alias(slots.out + i, slots.in + i, r.in_parts[mine].begin * element);
        break;
      case OpKind::kAllGatherParts:
        b.alias(slots.in + i, slots.out + i, r.out_parts[mine].begin * element);
        break;
      case OpKind::kScatter:
      case OpKind::kReduceScatter: b.alias(slots.out + i, slots.in + i, part); break;
      case OpKind::kGather:
      case OpKind::kAllGather: b.alias(slots.in + i, slots.out + i, part); break;
      default: b.alias(slots.in + i, slots.out + i, 0); break;
    }
  }
  return slots;
}

}  // namespace

Status emit_collective(PlanBuilder& b, const CollectiveRequest& request,
                       const CollectiveSlots& slots) {
  return on_two_levels(request) ? emit_two_level(b, request, slots)
                                : emit_one_level(b, request, slots);
}

Result<CollectiveSlots> emit_collective(PlanBuilder& b, const CollectiveRequest& request) {
  const CollectiveSlots slots = add_slots(b, request);
  SOTTO_TRY(emit_collective(b, request, slots));
  return slots;
}

void emit_message_exchange(PlanBuilder& b, int32_t rank, int32_t size, uint32_t rows,
                           uint64_t message_bytes, uint32_t round) {
  const Region own{rows, static_cast<uint64_t>(rank) * message_bytes, message_bytes};
  for (int32_t i = 1; i < size; ++i) b.send((rank + i) % size, own, round, MessageClass::kMetadata);
  for (int32_t i = 1; i < size; ++i) {
    const int32_t peer = (rank + i) % size;
    b.recv(peer, {rows, static_cast<uint64_t>(peer) * message_bytes, message_bytes}, round,
           MessageClass::kMetadata);
  }
}

}  // namespace sotto
