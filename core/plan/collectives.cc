#include "core/plan/collectives.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "core/plan/levels.h"
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

void emit_message_exchange(PlanBuilder& b, int32_t rank, int32_t size, const Levels* levels,
                           uint32_t rows, uint64_t message_bytes, uint32_t round) {
  const auto rows_of = [&](int32_t first, size_t count) {
    return Region{rows, static_cast<uint64_t>(first) * message_bytes, count * message_bytes};
  };
  // Between the ranks of a group. me: this rank's number in it; parts_of: what a number sends.
  const auto exchange = [&](const RankGroup& group, size_t me, const auto& parts_of, uint32_t at) {
    for (const bool sends : {true, false}) {
      for (size_t i = 1; i < group.size(); ++i) {
        const size_t other = (me + i) % group.size();
        for (const Region& part : parts_of(sends ? me : other)) {
          sends ? b.send(group[other], part, at, MessageClass::kMetadata)
                : b.recv(group[other], part, at, MessageClass::kMetadata);
        }
      }
    }
  };
  const auto own_rows = [&](const RankGroup& group) {
    return [&](size_t number) { return std::vector{rows_of(group[number], 1)}; };
  };
  if (levels == nullptr || !levels->several()) {
    RankGroup all(static_cast<size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    exchange(all, static_cast<size_t>(rank), own_rows(all), round);
    return;
  }
  const auto host = static_cast<size_t>(levels->host_of[static_cast<size_t>(rank)]);
  const auto local = static_cast<size_t>(levels->local_of[static_cast<size_t>(rank)]);
  exchange(levels->hosts[host], local, own_rows(levels->hosts[host]), round);
  RankGroup column;
  for (const RankGroup& ranks : levels->hosts) column.push_back(ranks[local]);
  // Ranks of a host that follow on each other are one message.
  const auto rows_of_host = [&](size_t number) {
    std::vector<Region> parts;
    const RankGroup& ranks = levels->hosts[number];
    for (size_t first = 0, last = 0; first < ranks.size(); first = last) {
      while (++last < ranks.size() && ranks[last] == ranks[last - 1] + 1) {
      }
      parts.push_back(rows_of(ranks[first], last - first));
    }
    return parts;
  };
  exchange(column, host, rows_of_host, round + 1);
  b.reserve_rounds(round + 2);
}

}  // namespace sotto
