#include "core/plan/two_level.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "core/plan/levels.h"
#include "core/plan/one_level.h"

namespace sotto {
namespace {

// Tensors of one level: their slots, elements and types.
struct Tensors {
  CollectiveSlots slots;
  SmallVector<uint64_t> counts;  // as CollectiveRequest::counts of the kind
  SmallVector<Dtype> dtypes;
  bool in_place = true;  // in and out are the same memory
};

class TwoLevels {
 public:
  TwoLevels(PlanBuilder& b, const CollectiveRequest& r, const CollectiveSlots& slots)
      : b_(b), r_(r), slots_(slots), levels_(*r.levels) {}

  Status all_reduce() { return sharded() ? all_reduce_of_shards() : all_reduce_of_leaders(); }

  Status broadcast() {
    const RankGroup between = one_of_each_host();
    SOTTO_TRY(b_.within({&between, 1}, r_.rank, [&](int32_t rank, int32_t size) {
      const uint32_t slot = at_root() ? slots_.in : slots_.out;
      return emit(OpKind::kBroadcast, rank, size, tensors_in({slot, slot}), host_of(r_.root));
    }));
    return inside([&](int32_t rank, int32_t size) {
      CollectiveRequest request =
          request_of(OpKind::kBroadcast, rank, size, tensors_in({slots_.out, slots_.out}));
      request.root = local_of(between[static_cast<size_t>(host_of(r_.rank))]);
      if (!at_root()) return emit_one_level(b_, request, {slots_.out, slots_.out});
      request.in_place = r_.in_place;
      return emit_one_level(b_, request, slots_);
    });
  }

  Status reduce() {
    const RankGroup between = one_of_each_host();
    const int32_t first = between[static_cast<size_t>(host_of(r_.rank))];
    const uint32_t sums = at_root() ? slots_.out : memory(first == r_.rank ? 1 : 0);
    SOTTO_TRY(inside([&](int32_t rank, int32_t size) {
      return emit(OpKind::kReduce, rank, size, tensors_in({slots_.in, sums}), local_of(first));
    }));
    return b_.within({&between, 1}, r_.rank, [&](int32_t rank, int32_t size) {
      return emit(OpKind::kReduce, rank, size, tensors_in({sums, sums}), host_of(r_.root));
    });
  }

  Status all_gather() {
    if (sharded()) {
      SOTTO_TRY(between_all([&](int32_t rank, int32_t size) {
        return gather_own(rank, size, levels_.columns[static_cast<size_t>(local_of(r_.rank))]);
      }));
      return inside(
          [&](int32_t rank, int32_t size) { return gather_of(rank, size, levels_.columns); });
    }
    SOTTO_TRY(inside([&](int32_t rank, int32_t size) {
      return gather_own(rank, size, levels_.hosts[static_cast<size_t>(host_of(r_.rank))]);
    }));
    SOTTO_TRY(between_all(
        [&](int32_t rank, int32_t size) { return gather_of(rank, size, levels_.hosts); }));
    return inside([&](int32_t rank, int32_t size) {
      return emit(OpKind::kBroadcast, rank, size, parts_of_other_hosts());
    });
  }

  Status reduce_scatter() {
    if (sharded()) {
      const uint32_t sums = memory(levels_.host_count());
      SOTTO_TRY(inside([&](int32_t rank, int32_t size) {
        return scatter_to(rank, size, slots_.in, levels_.columns, sums);
      }));
      return between_all([&](int32_t rank, int32_t size) {
        return emit(OpKind::kReduceScatter, rank, size, tensors_in({sums, slots_.out}));
      });
    }
    const bool leads = local_of(r_.rank) == 0;
    const uint32_t sums = memory(leads ? ranks() : 0);
    const uint32_t parts = memory(leads ? levels_.per_host() : 0);
    SOTTO_TRY(inside([&](int32_t rank, int32_t size) {
      Tensors all = tensors_in({slots_.in, sums});
      for (uint64_t& count : all.counts) count *= ranks();
      return emit(OpKind::kReduce, rank, size, all);
    }));
    SOTTO_TRY(between_all([&](int32_t rank, int32_t size) {
      return scatter_to(rank, size, sums, levels_.hosts, parts);
    }));
    return inside([&](int32_t rank, int32_t size) {
      return emit(OpKind::kScatter, rank, size, tensors_in({parts, slots_.out}));
    });
  }

  Status barrier() {
    std::vector<uint32_t> received;
    const auto emit = [&](int32_t rank, int32_t size) {
      emit_barrier(b_, rank, size, received);
      return ok_status();
    };
    SOTTO_TRY(inside(emit));
    const RankGroup alike = of_number(static_cast<size_t>(local_of(r_.rank)));
    return b_.within({&alike, 1}, r_.rank, emit);
  }

 private:
  // ---- ranks ----

  bool sharded() const { return levels_.kind == Hierarchy::kSharded; }
  bool at_root() const { return r_.rank == r_.root; }
  uint64_t ranks() const { return static_cast<uint64_t>(r_.size); }
  int32_t host_of(int32_t rank) const { return levels_.host_of[static_cast<size_t>(rank)]; }
  int32_t local_of(int32_t rank) const { return levels_.local_of[static_cast<size_t>(rank)]; }
  size_t tensors() const { return r_.counts.size(); }

  // The ranks with this number in their hosts.
  RankGroup of_number(size_t local) const {
    RankGroup group;
    for (const RankGroup& host : levels_.hosts) group.push_back(host[local]);
    return group;
  }

  // The root of the collective, and of other hosts the rank that it sends to or receives from.
  RankGroup one_of_each_host() const {
    RankGroup group = of_number(static_cast<size_t>(sharded() ? local_of(r_.root) : 0));
    group[static_cast<size_t>(host_of(r_.root))] = r_.root;
    return group;
  }

  // ---- levels ----

  Status inside(const PlanBuilder::EmitForGroup& emit) {
    return b_.within(levels_.hosts, r_.rank, emit);
  }
  // In columns, whose parts are equally large.
  Status between_all(const PlanBuilder::EmitForGroup& emit) {
    return b_.within(levels_.columns, r_.rank, emit);
  }

  CollectiveRequest request_of(OpKind kind, int32_t rank, int32_t size, const Tensors& t) const {
    CollectiveRequest request;
    request.kind = kind;
    request.rank = rank;
    request.size = size;
    request.reduce = r_.reduce;
    request.counts = t.counts;
    request.dtypes = t.dtypes;
    request.in_place.assign(t.counts.size(), t.in_place ? 1 : 0);
    request.segment_bytes = r_.segment_bytes;
    request.held = r_.held;
    return request;
  }
  Status emit(OpKind kind, int32_t rank, int32_t size, const Tensors& t, int32_t root = 0) {
    CollectiveRequest request = request_of(kind, rank, size, t);
    request.root = root;
    return emit_one_level(b_, request, t.slots);
  }

  // ---- memory ----

  uint64_t element(size_t tensor) const { return dtype_bytes(r_.dtypes[tensor]); }
  // A slot for each region, one after the other, which is the same memory.
  uint32_t views(const std::vector<Region>& regions) {
    uint32_t first = kNoSlot;
    for (const Region& region : regions) {
      const uint32_t slot = b_.scratch(region.bytes);
      b_.alias(slot, region.slot, region.offset);
      first = std::min(first, slot);
    }
    return first;
  }
  // Memory of the plan for so many times the elements of every tensor.
  uint32_t memory(uint64_t times) {
    uint32_t first = kNoSlot;
    for (size_t t = 0; t < tensors(); ++t)
      first = std::min(first, b_.scratch(times * r_.counts[t] * element(t)));
    return first;
  }
  Region part(uint32_t list, size_t tensor, uint64_t number) const {
    const uint64_t bytes = r_.counts[tensor] * element(tensor);
    return {list + static_cast<uint32_t>(tensor), number * bytes, bytes};
  }
  // The tensors of the request in other memory.
  Tensors tensors_in(CollectiveSlots slots) const {
    return {slots, r_.counts, r_.dtypes, slots.in == slots.out};
  }

  // ---- all-reduce ----

  // Every rank's share of the tensors, by tensor and rank: those of one type are one sequence.
  std::vector<Range> shares() const {
    std::map<Dtype, std::vector<size_t>> by_dtype;
    std::map<Dtype, uint64_t> elements;
    for (size_t t = 0; t < tensors(); ++t) {
      by_dtype[r_.dtypes[t]].push_back(t);
      elements[r_.dtypes[t]] += r_.counts[t];
    }
    const uint32_t shards = levels_.shards();
    std::vector<Range> shares(tensors() * shards);
    for (const auto& [dtype, members] : by_dtype) {
      for (uint32_t k = 0; k < shards; ++k) {
        const Range share = share_of(elements[dtype], shards, k, kDenseChunkAlign);
        uint64_t at = 0;  // of the tensor
        for (const size_t t : members) {
          const uint64_t end = at + r_.counts[t];
          const uint64_t begin = std::clamp(share.begin, at, end);
          shares[t * shards + k] = {begin - at, std::clamp(share.end(), at, end) - begin};
          at = end;
        }
      }
    }
    return shares;
  }

  Status all_reduce_of_shards() {
    const std::vector<Range> parts = shares();
    const uint32_t shards = levels_.shards();
    const auto mine = static_cast<size_t>(local_of(r_.rank));
    std::vector<Region> regions;
    for (size_t t = 0; t < tensors(); ++t) {
      const Range& share = parts[t * shards + mine];
      regions.push_back({slots_.out + static_cast<uint32_t>(t), share.begin * element(t),
                         share.count * element(t)});
    }
    const uint32_t shard = views(regions);
    SOTTO_TRY(inside([&](int32_t rank, int32_t size) {
      CollectiveRequest request =
          request_of(OpKind::kReduceScatterParts, rank, size, tensors_in({slots_.in, shard}));
      request.in_parts = parts;
      return emit_one_level(b_, request, {slots_.in, shard});
    }));
    SOTTO_TRY(within_columns(b_, levels_, r_.rank, [&](uint32_t k, int32_t rank, int32_t size) {
      Tensors of_shard = tensors_in({shard, shard});
      for (size_t t = 0; t < tensors(); ++t) of_shard.counts[t] = parts[t * shards + k].count;
      return emit(OpKind::kAllReduce, rank, size, of_shard);
    }));
    return inside([&](int32_t rank, int32_t size) {
      CollectiveRequest request =
          request_of(OpKind::kAllGatherParts, rank, size, tensors_in({slots_.out, slots_.out}));
      request.out_parts = parts;
      return emit_one_level(b_, request, {shard, slots_.out});
    });
  }

  Status all_reduce_of_leaders() {
    SOTTO_TRY(inside([&](int32_t rank, int32_t size) {
      return emit(OpKind::kReduce, rank, size, tensors_in(slots_));
    }));
    SOTTO_TRY(between_all([&](int32_t rank, int32_t size) {
      return emit(OpKind::kAllReduce, rank, size, tensors_in({slots_.out, slots_.out}));
    }));
    return inside([&](int32_t rank, int32_t size) {
      return emit(OpKind::kBroadcast, rank, size, tensors_in({slots_.out, slots_.out}));
    });
  }

  // ---- parts of ranks ----

  // Parts of the ranks that `members` stand for, equally many each: a tensor for every number i, of
  // which member j has the part of rank members[j][i].
  std::vector<Range> parts_by_member(const std::vector<RankGroup>& members) const {
    std::vector<Range> parts;
    for (size_t t = 0; t < tensors(); ++t) {
      for (size_t i = 0; i < members.front().size(); ++i) {
        for (const RankGroup& ranks : members) {
          const auto number = static_cast<uint64_t>(ranks[i]);
          parts.push_back({number * r_.counts[t], r_.counts[t]});
        }
      }
    }
    return parts;
  }
  // The same tensors: every tensor of the request as often as a member has parts.
  template <class RegionOf>  // (tensor, i)
  uint32_t views_by_member(const std::vector<RankGroup>& members, const RegionOf& region_of) {
    std::vector<Region> regions;
    for (size_t t = 0; t < tensors(); ++t) {
      for (size_t i = 0; i < members.front().size(); ++i) regions.push_back(region_of(t, i));
    }
    return views(regions);
  }
  CollectiveRequest parts_request(OpKind kind, int32_t rank, int32_t size,
                                  const std::vector<RankGroup>& members) const {
    Tensors all;
    for (size_t t = 0; t < tensors(); ++t) {
      for (size_t i = 0; i < members.front().size(); ++i) {
        all.counts.push_back(members.size() * r_.counts[t]);
        all.dtypes.push_back(r_.dtypes[t]);
      }
    }
    return request_of(kind, rank, size, all);
  }
  uint32_t whole_by_member(const std::vector<RankGroup>& members, uint32_t list) {
    return views_by_member(members, [&](size_t t, size_t) {
      const Region all{list + static_cast<uint32_t>(t), 0, ranks() * r_.counts[t] * element(t)};
      return all;
    });
  }

  // Every rank's own part to all of the group.
  Status gather_own(int32_t rank, int32_t size, const RankGroup& group) {
    std::vector<RankGroup> members;
    for (const int32_t member : group) members.push_back({member});
    CollectiveRequest request = parts_request(OpKind::kAllGatherParts, rank, size, members);
    request.in_place = r_.in_place;
    request.out_parts = parts_by_member(members);
    return emit_one_level(b_, request, slots_);
  }

  // Every member has the parts of its ranks in the caller's tensors, and sends them to all.
  Status gather_of(int32_t rank, int32_t size, const std::vector<RankGroup>& members) {
    const RankGroup& mine = members[static_cast<size_t>(rank)];
    CollectiveRequest request = parts_request(OpKind::kAllGatherParts, rank, size, members);
    request.out_parts = parts_by_member(members);
    const uint32_t own = views_by_member(members, [&](size_t t, size_t i) {
      return part(slots_.out, t, static_cast<uint64_t>(mine[i]));
    });
    return emit_one_level(b_, request, {own, whole_by_member(members, slots_.out)});
  }

  // Every member gets the parts of its ranks, one after the other, of tensors that have all.
  Status scatter_to(int32_t rank, int32_t size, uint32_t all, const std::vector<RankGroup>& members,
                    uint32_t own) {
    CollectiveRequest request = parts_request(OpKind::kReduceScatterParts, rank, size, members);
    request.in_parts = parts_by_member(members);
    const uint32_t results =
        views_by_member(members, [&](size_t t, size_t i) { return part(own, t, i); });
    return emit_one_level(b_, request, {whole_by_member(members, all), results});
  }

  // In the caller's tensors: what other hosts have, in runs of neighbours.
  Tensors parts_of_other_hosts() {
    Tensors runs;
    std::vector<Region> regions;
    for (size_t t = 0; t < tensors(); ++t) {
      for (int32_t begin = 0, end = 0; begin < r_.size; begin = end) {
        end = begin + 1;
        if (host_of(begin) == host_of(r_.rank)) continue;
        while (end < r_.size && host_of(end) != host_of(r_.rank)) ++end;
        Region run = part(slots_.out, t, static_cast<uint64_t>(begin));
        run.bytes *= static_cast<uint64_t>(end - begin);
        regions.push_back(run);
        runs.counts.push_back(run.bytes / element(t));
        runs.dtypes.push_back(r_.dtypes[t]);
      }
    }
    runs.slots.in = runs.slots.out = views(regions);
    return runs;
  }

  PlanBuilder& b_;
  const CollectiveRequest& r_;
  const CollectiveSlots slots_;
  const Levels& levels_;
};

}  // namespace

bool on_two_levels(const CollectiveRequest& r) {
  if (r.levels == nullptr || !r.levels->several()) return false;
  return r.kind == OpKind::kAllReduce || r.kind == OpKind::kReduceScatter ||
         r.kind == OpKind::kAllGather || r.kind == OpKind::kBroadcast ||
         r.kind == OpKind::kReduce || r.kind == OpKind::kBarrier;
}

Status emit_two_level(PlanBuilder& b, const CollectiveRequest& r, const CollectiveSlots& slots) {
  TwoLevels levels(b, r, slots);
  switch (r.kind) {
    case OpKind::kAllReduce: return levels.all_reduce();
    case OpKind::kReduceScatter: return levels.reduce_scatter();
    case OpKind::kAllGather: return levels.all_gather();
    case OpKind::kBroadcast: return levels.broadcast();
    case OpKind::kReduce: return levels.reduce();
    case OpKind::kBarrier: return levels.barrier();
    default: return error(Code::kInternal, "a kind of one level");
  }
}

}  // namespace sotto
