#include "core/plan/levels.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "core/base/text.h"

namespace sotto {

Levels flat_levels(int32_t ranks) {
  std::vector<int32_t> hosts(static_cast<size_t>(ranks));
  std::iota(hosts.begin(), hosts.end(), 0);
  return *make_levels(Hierarchy::kFlat, hosts);
}

Result<Levels> make_levels(Hierarchy kind, std::span<const int32_t> hosts) {
  Levels levels;
  const auto ranks = static_cast<int32_t>(hosts.size());
  const auto place = [&](int32_t rank, size_t host) {
    if (levels.hosts.size() <= host) levels.hosts.resize(host + 1);
    levels.host_of.push_back(static_cast<int32_t>(host));
    levels.local_of.push_back(static_cast<int32_t>(levels.hosts[host].size()));
    levels.hosts[host].push_back(rank);
  };
  if (kind != Hierarchy::kFlat) {
    for (int32_t r = 0; r < ranks; ++r) place(r, static_cast<size_t>(hosts[r]));
    const auto other = std::ranges::find_if(levels.hosts, [&](const RankGroup& host) {
      return host.size() != levels.hosts.front().size();
    });
    if (other != levels.hosts.end() && kind != Hierarchy::kAuto) {
      return invalid_argument(
          "hierarchy \"{}\": the host of rank {} has {} of the comm, that of rank {} has {}; "
          "all hosts need equally many, or hierarchy \"flat\"",
          hierarchy_name(kind), levels.hosts[0][0], counted(levels.hosts[0].size(), "rank"),
          other->front(), other->size());
    }
    if (kind == Hierarchy::kAuto) {
      const bool two =
          other == levels.hosts.end() && levels.hosts.size() > 1 && levels.hosts.front().size() > 1;
      kind = two ? Hierarchy::kSharded : Hierarchy::kFlat;
    }
  }
  levels.kind = kind;
  if (kind == Hierarchy::kFlat) {
    levels = {};
    for (int32_t r = 0; r < ranks; ++r) place(r, static_cast<size_t>(r));
  }
  const bool sharded = kind == Hierarchy::kSharded && levels.hosts.size() > 1;
  const size_t shards = sharded ? levels.per_host() : 1;
  for (size_t s = 0; s < shards; ++s) {
    RankGroup column;
    for (const RankGroup& host : levels.hosts) column.push_back(host[s]);
    levels.columns.push_back(std::move(column));
  }
  return levels;
}

bool serves(const Levels* levels, int32_t rank) {
  return levels == nullptr || levels->serves(rank);
}

uint32_t server_of(const Levels* levels, int32_t rank) {
  return levels == nullptr ? static_cast<uint32_t>(rank) : levels->server_of(rank);
}

std::string servers_text(const Levels* levels, std::span<const uint32_t> servers) {
  std::set<size_t> ranks;
  for (const uint32_t server : servers) {
    if (levels == nullptr) {
      ranks.insert(server);
    } else {
      ranks.insert(static_cast<size_t>(levels->hosts[server % levels->host_count()].front()));
    }
  }
  return fmt::format("{}rank {}", levels == nullptr ? "" : "a rank on the host of ",
                     list_of_ranks({ranks.begin(), ranks.end()}));
}

Status within_columns(PlanBuilder& b, const Levels& levels, int32_t me, const EmitForShard& emit) {
  const bool sharded = levels.shards() > 1;
  const auto shard = sharded ? static_cast<uint32_t>(levels.local_of[static_cast<size_t>(me)]) : 0u;
  return b.within(levels.columns, me, [&](int32_t rank, int32_t size) -> Status {
    uint32_t end = b.next_round();
    if (shard != 0) {
      SOTTO_ASSIGN(end, b.end_of_rounds([&] { return emit(0, rank, size); }));
    }
    SOTTO_TRY(emit(shard, rank, size));
    b.reserve_rounds(end);
    return ok_status();
  });
}

}  // namespace sotto
