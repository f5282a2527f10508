// Plans on two levels: who sends to whom, how many bytes go between hosts, and that one level is
// the plan that there is without any.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <functional>
#include <set>

#include "core/plan/collectives.h"
#include "core/plan/flat_reduce.h"
#include "tests/support/matched_plans.h"

namespace sotto::test {
namespace {

using Hosts = std::vector<int32_t>;

const Hosts kHosts[] = {{0, 1, 0, 1}, {0, 0, 0, 1, 1, 1}, {0, 1, 2, 2, 0, 1}, {0, 0, 1, 1, 2, 2}};
constexpr Hierarchy kTwoLevels[] = {Hierarchy::kSharded, Hierarchy::kLeader};
constexpr OpKind kKinds[] = {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather,
                             OpKind::kBroadcast, OpKind::kReduce};
constexpr int32_t kRoot = 3;

CollectiveRequest request_of(OpKind kind, std::vector<uint64_t> counts, const Levels* levels) {
  CollectiveRequest request;
  request.kind = kind;
  request.root = kRoot;
  request.counts = std::move(counts);
  request.dtypes.assign(request.counts.size(), Dtype::kF32);
  request.in_place.assign(request.counts.size(), 0);
  request.levels = levels;
  return request;
}

// The plans of all ranks, which go on in the same round.
std::vector<LogicalPlan> plans_of(int32_t ranks,
                                  const std::function<void(PlanBuilder&, int32_t rank)>& emit) {
  std::vector<LogicalPlan> plans;
  std::set<uint32_t> rounds;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    PlanBuilder b;
    emit(b, rank);
    rounds.insert(b.next_round());
    plans.push_back(b.take());
  }
  EXPECT_EQ(rounds.size(), 1u);
  return plans;
}

std::vector<LogicalPlan> plans_of(int32_t ranks, const CollectiveRequest& request) {
  return plans_of(ranks, [&](PlanBuilder& b, int32_t rank) {
    CollectiveRequest of_rank = request;
    of_rank.rank = rank;
    of_rank.size = ranks;
    const Status status = emit_collective(b, of_rank).status();
    EXPECT_TRUE(status.ok()) << status.text();
  });
}

using OnMessage = std::function<void(int32_t from, const MessageStep& message)>;
void each_send(const std::vector<LogicalPlan>& plans, const OnMessage& f) {
  for (size_t r = 0; r < plans.size(); ++r) {
    for (const Step& step : plans[r].steps) {
      if (is_send(step)) f(static_cast<int32_t>(r), *step.message());
    }
  }
}

uint64_t bytes_between_hosts(const std::vector<LogicalPlan>& plans, const Hosts& hosts) {
  uint64_t bytes = 0;
  each_send(plans, [&](int32_t from, const MessageStep& m) {
    if (hosts[static_cast<size_t>(from)] != hosts[static_cast<size_t>(m.peer)])
      bytes += m.data.bytes;
  });
  return bytes;
}

// Ranks of two hosts exchange messages only in a column, or as the first ranks of their hosts. The
// root takes its host's place in a broadcast or a reduction.
void expect_pairs(const std::vector<LogicalPlan>& plans, const Levels& levels, bool rooted) {
  each_send(plans, [&](int32_t from, const MessageStep& m) {
    const auto a = static_cast<size_t>(from), b = static_cast<size_t>(m.peer);
    if (levels.host_of[a] == levels.host_of[b]) return;
    if (levels.kind == Hierarchy::kSharded) {
      EXPECT_EQ(levels.local_of[a], levels.local_of[b]) << a << " to " << b;
    } else {
      for (const size_t rank : {a, b})
        EXPECT_TRUE(levels.local_of[rank] == 0 || (rooted && rank == kRoot)) << a << " to " << b;
    }
  });
}

TEST(TwoLevelPlan, MessagesMatchInsideHostsAndColumns) {
  for (const Hosts& hosts : kHosts) {
    for (const Hierarchy hierarchy : kTwoLevels) {
      const Levels levels = *make_levels(hierarchy, hosts);
      for (const OpKind kind : kKinds) {
        SCOPED_TRACE(static_cast<int>(kind));
        for (const std::vector<uint64_t>& counts :
             {std::vector<uint64_t>{1}, {20, 0, 3}, {300'003, 7}}) {
          const auto plans = plans_of(levels.ranks(), request_of(kind, counts, &levels));
          expect_matched(plans);
          expect_pairs(plans, levels, kind == OpKind::kBroadcast || kind == OpKind::kReduce);
        }
      }
    }
  }
}

// Rows travel inside hosts, then those of a host to the same number on the others: few messages,
// and no rank meets another that has another number on another host.
TEST(TwoLevelPlan, SmallMessagesOfAllRanksReachAll) {
  constexpr uint64_t kBytes = 16;
  for (const Hosts& hosts : kHosts) {
    for (const Hierarchy hierarchy : kTwoLevels) {
      const Levels levels = *make_levels(hierarchy, hosts);
      const int32_t ranks = levels.ranks();
      const auto plans = plans_of(ranks, [&](PlanBuilder& b, int32_t rank) {
        const uint32_t rows = b.scratch(kBytes * static_cast<uint64_t>(ranks));
        emit_message_exchange(b, rank, ranks, &levels, rows, kBytes, b.next_round());
        EXPECT_EQ(b.next_round(), 2u);
      });
      expect_matched(plans);
      std::vector<std::set<uint64_t>> known(hosts.size());
      for (size_t r = 0; r < hosts.size(); ++r) known[r].insert(r);
      for (const uint32_t round : {0u, 1u}) {
        const auto before = known;
        each_send(plans, [&](int32_t from, const MessageStep& m) {
          EXPECT_TRUE(levels.linked(from, m.peer)) << from << " to " << m.peer;
          if (m.round != round) return;
          for (uint64_t row = m.data.offset / kBytes; row * kBytes < m.data.offset + m.data.bytes;
               ++row) {
            EXPECT_TRUE(before[static_cast<size_t>(from)].contains(row));
            EXPECT_TRUE(known[static_cast<size_t>(m.peer)].insert(row).second) << "twice";
          }
        });
      }
      for (const auto& rows : known) EXPECT_EQ(rows.size(), hosts.size());
    }
  }
}

// Shards of 16'400 elements need two steps, those of 16'384 one.
TEST(TwoLevelPlan, ColumnsOfSmallerShardsWaitForTheOthers) {
  const Levels levels = *make_levels(Hierarchy::kSharded, kHosts[0]);
  expect_matched(plans_of(4, request_of(OpKind::kAllReduce, {32'784}, &levels)));
}

// M hosts of L ranks, n bytes of the vector, which all shares divide.
TEST(TwoLevelPlan, BytesBetweenHosts) {
  constexpr uint64_t kPart = 96'000;
  for (const Hosts& hosts : kHosts) {
    const uint64_t ranks = hosts.size();
    for (const Hierarchy hierarchy : kTwoLevels) {
      const Levels levels = *make_levels(hierarchy, hosts);
      const uint64_t m = levels.host_count(), n = 4 * kPart * ranks;
      for (const OpKind kind : kKinds) {
        SCOPED_TRACE(static_cast<int>(kind));
        const bool parts = kind == OpKind::kReduceScatter || kind == OpKind::kAllGather;
        const std::vector<uint64_t> counts{parts ? kPart : kPart * ranks};
        uint64_t expected = (m - 1) * n;
        if (kind == OpKind::kAllReduce) expected *= 2;
        // Chunks of a reduction travel to who adds them up, and from there to the root.
        if (kind == OpKind::kReduce && m > 2) expected += (m - 1) * n / m;
        if (kind == OpKind::kAllGather) expected = (m - 1) * n;
        const auto plans = plans_of(levels.ranks(), request_of(kind, counts, &levels));
        EXPECT_EQ(bytes_between_hosts(plans, hosts), expected);
        const auto flat = plans_of(levels.ranks(), request_of(kind, counts, nullptr));
        EXPECT_GT(bytes_between_hosts(flat, hosts), expected);
      }
    }
  }
}

void expect_equal(const std::vector<LogicalPlan>& a, const std::vector<LogicalPlan>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t r = 0; r < a.size(); ++r) {
    ASSERT_EQ(a[r].steps.size(), b[r].steps.size());
    ASSERT_EQ(a[r].slots.size(), b[r].slots.size());
    for (size_t i = 0; i < a[r].steps.size(); ++i) {
      ASSERT_EQ(a[r].steps[i].work.index(), b[r].steps[i].work.index());
      const MessageStep *const one = a[r].steps[i].message(), *const other =
                                                                  b[r].steps[i].message();
      if (one == nullptr) continue;
      EXPECT_EQ(one->is_send, other->is_send);
      EXPECT_EQ(one->peer, other->peer);
      EXPECT_EQ(one->round, other->round);
      EXPECT_EQ(one->data.slot, other->data.slot);
      EXPECT_EQ(one->data.offset, other->data.offset);
      EXPECT_EQ(one->data.bytes, other->data.bytes);
    }
  }
}

TEST(TwoLevelPlan, OneHostAndHostsOfOneRankHaveThePlainPlan) {
  for (const Hosts& hosts : {Hosts{0, 0, 0, 0}, Hosts{0, 1, 2, 3}}) {
    for (const Hierarchy hierarchy : kTwoLevels) {
      const Levels levels = *make_levels(hierarchy, hosts);
      EXPECT_FALSE(levels.several());
      for (const OpKind kind : kKinds)
        expect_equal(plans_of(4, request_of(kind, {50'000}, &levels)),
                     plans_of(4, request_of(kind, {50'000}, nullptr)));
    }
  }
}

TEST(TwoLevelPlan, OtherKindsHaveOneLevel) {
  const Levels levels = *make_levels(Hierarchy::kSharded, kHosts[0]);
  for (const OpKind kind : {OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll})
    expect_equal(plans_of(4, request_of(kind, {5000}, &levels)),
                 plans_of(4, request_of(kind, {5000}, nullptr)));
}

// How many ranks have a step that the rank's plan ends behind, by the order of plans and by
// messages.
size_t ranks_before_the_end(const std::vector<LogicalPlan>& plans, int32_t rank) {
  std::set<std::pair<int32_t, uint32_t>> found;
  std::vector<std::pair<int32_t, uint32_t>> open;
  const auto add = [&](int32_t r, uint32_t step) {
    if (found.emplace(r, step).second) open.emplace_back(r, step);
  };
  for (uint32_t i = 0; i < plans[static_cast<size_t>(rank)].steps.size(); ++i) add(rank, i);
  while (!open.empty()) {
    const auto [r, i] = open.back();
    open.pop_back();
    const Step& step = plans[static_cast<size_t>(r)].steps[i];
    for (const uint32_t before : step.after) add(r, before);
    if (!is_receive(step)) continue;
    const MessageStep& m = *step.message();
    const std::vector<Step>& theirs = plans[static_cast<size_t>(m.peer)].steps;
    for (uint32_t k = 0; k < theirs.size(); ++k) {
      const MessageStep* const s = theirs[k].message();
      if (is_send(theirs[k]) && s->peer == r && s->round == m.round) add(m.peer, k);
    }
  }
  std::set<int32_t> ranks;
  for (const auto& [r, step] : found) ranks.insert(r);
  return ranks.size();
}

TEST(OneLevelPlan, ABarrierWaitsForAll) {
  for (const int32_t ranks : {2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 23}) {
    const auto plans = plans_of(ranks, request_of(OpKind::kBarrier, {}, nullptr));
    for (int32_t rank = 0; rank < ranks; ++rank)
      EXPECT_EQ(ranks_before_the_end(plans, rank), static_cast<size_t>(ranks)) << "rank " << rank;
  }
}

TEST(TwoLevelPlan, ABarrierWaitsForAllAndUsesLinkedPairsAlone) {
  for (const Hosts& hosts : kHosts) {
    for (const Hierarchy hierarchy : kTwoLevels) {
      const Levels levels = *make_levels(hierarchy, hosts);
      const auto plans = plans_of(levels.ranks(), request_of(OpKind::kBarrier, {}, &levels));
      expect_matched(plans);
      std::vector<uint32_t> sent(hosts.size());
      each_send(plans, [&](int32_t from, const MessageStep& m) {
        EXPECT_TRUE(levels.linked(from, m.peer)) << from << " to " << m.peer;
        EXPECT_EQ(m.data.bytes, 0u);
        ++sent[static_cast<size_t>(from)];
      });
      for (const uint32_t messages : sent) {
        EXPECT_EQ(messages, static_cast<uint32_t>(std::bit_width(levels.per_host() - 1) +
                                                  std::bit_width(levels.host_count() - 1)));
      }
      for (int32_t rank = 0; rank < levels.ranks(); ++rank)
        EXPECT_EQ(ranks_before_the_end(plans, rank), hosts.size()) << "rank " << rank;
    }
  }
}

// The average of optimizers. With messages of 8 KiB and as large windows, of two hosts of two ranks
// shards of 4112 elements have two windows and those of 4096 have one.
TEST(TwoLevelPlan, FlatReductionsMatchToo) {
  for (const Hosts& hosts : kHosts) {
    for (const Hierarchy hierarchy : kTwoLevels) {
      const Levels levels = *make_levels(hierarchy, hosts);
      for (const uint64_t count : {uint64_t{3}, uint64_t{8208}, uint64_t{480'000}}) {
        const std::vector<uint64_t> counts{count - 2, 2};
        const FlatLayout layout = FlatLayout::concatenated(counts, std::vector<uint32_t>{0, 1});
        const auto plans = plans_of(levels.ranks(), [&](PlanBuilder& b, int32_t rank) {
          FlatReduceRequest request;
          request.rank = rank;
          request.size = levels.ranks();
          request.layout = &layout;
          request.in_list = b.bound_list(std::vector<uint64_t>{4 * counts[0], 4 * counts[1]});
          request.out_flat = b.scratch(flat_reduce_bytes(request));
          request.segment_bytes = 8192;
          request.held = {.count = 2, .bytes = 8192};
          request.native = ~0u;
          request.levels = &levels;
          EXPECT_EQ(flat_reduce_bytes(request), 4 * count);
          emit_flat_all_reduce(b, request);
        });
        expect_matched(plans);
        expect_pairs(plans, levels, false);
        if (count == 480'000) {
          EXPECT_EQ(bytes_between_hosts(plans, hosts), 2 * (levels.host_count() - 1) * 4 * count);
        }
      }
    }
  }
}

TEST(Levels, AreOfHostsWithEquallyManyRanks) {
  const Hosts uneven{0, 1, 0, 0, 1};
  for (const Hierarchy hierarchy : kTwoLevels) {
    const Status status = make_levels(hierarchy, uneven).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.text(),
                testing::HasSubstr("the host of rank 0 has 3 ranks of the comm, that of rank 1 has "
                                   "2; all hosts need equally many"));
  }
  EXPECT_EQ(make_levels(Hierarchy::kAuto, uneven)->kind, Hierarchy::kFlat);
  EXPECT_EQ(make_levels(Hierarchy::kAuto, kHosts[0])->kind, Hierarchy::kSharded);
  EXPECT_EQ(make_levels(Hierarchy::kAuto, Hosts{0, 0})->kind, Hierarchy::kFlat);
  EXPECT_EQ(make_levels(Hierarchy::kAuto, Hosts{0, 1})->kind, Hierarchy::kFlat);
  const Levels leader = *make_levels(Hierarchy::kLeader, kHosts[2]);
  EXPECT_EQ(leader.hosts, (std::vector<RankGroup>{{0, 4}, {1, 5}, {2, 3}}));
  EXPECT_EQ(leader.columns, (std::vector<RankGroup>{{0, 1, 2}}));
  EXPECT_EQ(make_levels(Hierarchy::kSharded, kHosts[2])->columns,
            (std::vector<RankGroup>{{0, 1, 2}, {4, 5, 3}}));
}

}  // namespace
}  // namespace sotto::test
