// The two levels of a hierarchy: which ranks share a host, and which exchange messages between
// hosts. Every host has equally many ranks.
//
// With L ranks on each of M hosts, values are cut into shards: L of them, one per rank of a host
// (sharded), or one, which is the first rank's (leader, and one host). The ranks that have the same
// shard are a column, of M ranks. In one level every rank is a host, and there is one shard.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/base/hierarchy.h"
#include "core/base/status.h"
#include "core/plan/builder.h"

namespace sotto {

struct Levels {
  Hierarchy kind = Hierarchy::kFlat;  // not kAuto
  std::vector<RankGroup> hosts;       // M groups of L ranks, in ascending order
  std::vector<RankGroup> columns;     // a group of M ranks for each shard, in the order of `hosts`
  std::vector<int32_t> host_of;       // by rank: index in `hosts`
  std::vector<int32_t> local_of;      // by rank: number in its host

  int32_t ranks() const { return static_cast<int32_t>(host_of.size()); }
  uint32_t per_host() const { return static_cast<uint32_t>(hosts.front().size()); }
  uint32_t host_count() const { return static_cast<uint32_t>(hosts.size()); }
  uint32_t shards() const { return static_cast<uint32_t>(columns.size()); }
  bool flat() const { return per_host() == 1; }
  // Ranks that are in a column. They are numbered column by column, and in each by host.
  uint32_t servers() const { return shards() * host_count(); }
  bool serves(int32_t rank) const { return shard_of(rank) < shards(); }
  uint32_t shard_of(int32_t rank) const { return static_cast<uint32_t>(local_of[rank]); }
  int32_t rank_of(uint32_t server) const {
    return columns[server / host_count()][server % host_count()];
  }
  uint32_t server_of(int32_t rank) const {
    return shard_of(rank) * host_count() + static_cast<uint32_t>(host_of[rank]);
  }
  // Whether operations in these levels have messages between two ranks: they are of one host, or
  // have the same number in theirs.
  bool linked(int32_t a, int32_t b) const {
    return host_of[static_cast<size_t>(a)] == host_of[static_cast<size_t>(b)] ||
           local_of[static_cast<size_t>(a)] == local_of[static_cast<size_t>(b)];
  }
  // There are messages inside hosts and messages between them.
  bool several() const { return !flat() && host_count() > 1; }
  // As requests take them; null: one level. Of codecs, which one host has too, and of sums.
  const Levels* two() const { return flat() ? nullptr : this; }
  const Levels* of_sums() const { return several() ? this : nullptr; }
  bool operator==(const Levels&) const = default;
};

// hosts: by rank, the index of its host, from 0 in the order of the lowest rank of each
// (Comm::hosts). INVALID_ARGUMENT names hosts that have different numbers of ranks, unless it is
// kAuto: then flat.
Result<Levels> make_levels(Hierarchy kind, std::span<const int32_t> hosts);
// One level.
Levels flat_levels(int32_t ranks);

// Whether a rank has a shard, and its number among servers. levels: null: one level.
bool serves(const Levels* levels, int32_t rank);
uint32_t server_of(const Levels* levels, int32_t rank);

// "rank 0, 2"; in two levels, where a server has the sums of a host, "a rank on the host of rank 0,
// 2". levels: null: one level.
std::string servers_text(const Levels* levels, std::span<const uint32_t> servers);

// A section in which the ranks of each column exchange messages about their shard, as
// PlanBuilder::within. Shards may differ in size: emit is also called for shard 0, which is the
// largest and takes most rounds, and what it emits for that is taken back.
using EmitForShard = std::function<Status(uint32_t shard, int32_t rank, int32_t size)>;
Status within_columns(PlanBuilder& builder, const Levels& levels, int32_t me,
                      const EmitForShard& emit);

}  // namespace sotto
