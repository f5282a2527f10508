// Sections of a plan in which groups of ranks work for themselves: who sends to whom, and rounds
// that are equal on all ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "core/codec/compressed.h"
#include "core/plan/collectives.h"
#include "tests/support/matched_plans.h"

namespace sotto::test {
namespace {

CollectiveRequest request_of(OpKind kind, uint64_t count, int32_t rank, int32_t size) {
  CollectiveRequest request;
  request.kind = kind;
  request.rank = rank;
  request.size = size;
  request.counts = {count};
  request.dtypes = {Dtype::kF32};
  request.in_place = {0};
  return request;
}

PlanBuilder::EmitForGroup collective(PlanBuilder& b, OpKind kind, uint64_t count,
                                     int32_t root = 0) {
  return [&b, kind, count, root](int32_t rank, int32_t size) {
    CollectiveRequest request = request_of(kind, count, rank, size);
    request.root = root;
    return emit_collective(b, request).status();
  };
}

std::set<int32_t> peers_of(const LogicalPlan& plan) {
  std::set<int32_t> peers;
  for (const Step& step : plan.steps) {
    if (step.message() != nullptr) peers.insert(step.message()->peer);
  }
  return peers;
}

TEST(GroupPlan, PeersAreThoseOfTheGroup) {
  const std::vector<RankGroup> rows = {{0, 2, 5}, {4, 1, 3}};
  for (const OpKind kind :
       {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kBroadcast,
        OpKind::kReduce, OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll, OpKind::kBarrier}) {
    for (const uint64_t count : {10u, 300'000u}) {
      std::vector<LogicalPlan> plans;
      for (int32_t me = 0; me < 6; ++me) {
        PlanBuilder b;
        ASSERT_TRUE(b.within(rows, me, collective(b, kind, count, 1)).ok());
        EXPECT_TRUE(b.of_all_ranks());
        plans.push_back(b.take());
        const RankGroup& row = rows[me == 0 || me == 2 || me == 5 ? 0 : 1];
        for (const int32_t peer : peers_of(plans.back())) {
          EXPECT_NE(peer, me);
          EXPECT_NE(std::ranges::find(row, peer), row.end()) << "rank " << me << " and " << peer;
        }
      }
      expect_matched(plans);
    }
  }
}

// The plan of a group of all ranks is the plan without one.
TEST(GroupPlan, AGroupOfAllRanksChangesNothing) {
  const RankGroup all = {0, 1, 2, 3};
  for (const uint64_t count : {10u, 300'000u}) {
    PlanBuilder grouped, plain;
    ASSERT_TRUE(grouped.within({&all, 1}, 2, collective(grouped, OpKind::kAllReduce, count)).ok());
    ASSERT_TRUE(emit_collective(plain, request_of(OpKind::kAllReduce, count, 2, 4)).ok());
    EXPECT_EQ(grouped.next_round(), plain.next_round());
    const LogicalPlan a = grouped.take(), b = plain.take();
    ASSERT_EQ(a.steps.size(), b.steps.size());
    for (size_t i = 0; i < a.steps.size(); ++i) {
      ASSERT_EQ(a.steps[i].work.index(), b.steps[i].work.index());
      const MessageStep *const one = a.steps[i].message(), *const other = b.steps[i].message();
      if (one == nullptr) continue;
      EXPECT_EQ(one->is_send, other->is_send);
      EXPECT_EQ(one->peer, other->peer);
      EXPECT_EQ(one->round, other->round);
      EXPECT_EQ(one->data.bytes, other->data.bytes);
    }
  }
}

// Groups of several sizes take as many rounds as the one that takes most. A rank of no group has
// neither steps nor slots of the section, and goes on in the same round.
TEST(GroupPlan, AllRanksGoOnInTheSameRound) {
  const std::vector<RankGroup> groups = {{0, 1, 2, 3, 4}, {5, 6}, {7}};
  for (const OpKind kind : {OpKind::kBroadcast, OpKind::kReduce, OpKind::kGather, OpKind::kBarrier,
                            OpKind::kAllReduce, OpKind::kAllToAll}) {
    std::set<uint32_t> rounds;
    std::vector<LogicalPlan> plans;
    for (int32_t me = 0; me < 9; ++me) {
      PlanBuilder b;
      b.scratch(8);
      ASSERT_TRUE(b.within(groups, me, collective(b, kind, 1000)).ok());
      rounds.insert(b.next_round());
      ASSERT_TRUE(emit_collective(b, request_of(OpKind::kBarrier, 0, me, 9)).ok());
      plans.push_back(b.take());
      if (me < 8) continue;
      for (const Step& step : plans.back().steps) {
        ASSERT_NE(step.message(), nullptr);
        EXPECT_GE(step.message()->round, *rounds.begin());
      }
      PlanBuilder plain;
      plain.scratch(8);
      ASSERT_TRUE(emit_collective(plain, request_of(OpKind::kBarrier, 0, me, 9)).ok());
      EXPECT_EQ(plans.back().slots.size(), plain.take().slots.size());
    }
    EXPECT_EQ(rounds.size(), 1u) << static_cast<int>(kind);
    EXPECT_GT(*rounds.begin(), 0u);
    expect_matched(plans);
  }
}

// As many rounds as a section takes, on every rank of it: broadcasts end at different times.
TEST(GroupPlan, ACollectiveReservesItsRounds) {
  for (const OpKind kind : {OpKind::kBroadcast, OpKind::kReduce, OpKind::kAllReduce}) {
    for (const uint64_t count : {1000u, 300'000u}) {
      std::set<uint32_t> rounds;
      for (int32_t me = 0; me < 5; ++me) {
        PlanBuilder b;
        ASSERT_TRUE(emit_collective(b, request_of(kind, count, me, 5)).ok());
        rounds.insert(b.next_round());
      }
      EXPECT_EQ(rounds.size(), 1u) << static_cast<int>(kind) << ", " << count;
    }
  }
}

TEST(GroupPlan, SectionsCanBeNested) {
  const std::vector<RankGroup> halves = {{0, 1, 2, 3}, {7, 6, 5, 4}};
  const std::vector<RankGroup> pairs = {{0, 3}, {1, 2}};
  const int32_t partner[] = {3, 2, 1, 0, 7, 6, 5, 4};
  for (int32_t me = 0; me < 8; ++me) {
    PlanBuilder b;
    const auto of_half = [&](int32_t rank, int32_t size) {
      EXPECT_EQ(size, 4);
      return b.within(pairs, rank, [&](int32_t r, int32_t n) {
        EXPECT_EQ(n, 2);
        EXPECT_EQ(b.comm_rank(r), me);
        return emit_collective(b, request_of(OpKind::kAllReduce, 10, r, n)).status();
      });
    };
    ASSERT_TRUE(b.within(halves, me, of_half).ok());
    EXPECT_EQ(peers_of(b.take()), std::set<int32_t>{partner[me]});
  }
}

TEST(GroupPlan, OtherEmittersWorkInGroupsToo) {
  const std::vector<RankGroup> groups = {{1, 3, 5}, {0, 4}};
  std::vector<LogicalPlan> plans;
  for (int32_t me = 0; me < 6; ++me) {
    PlanBuilder b;
    ASSERT_TRUE(b.within(groups, me, [&](int32_t rank, int32_t size) {
                   const uint32_t rows = b.scratch(16 * static_cast<uint64_t>(size));
                   emit_message_exchange(b, rank, size, nullptr, rows, 16, b.next_round());
                   return ok_status();
                 }).ok());
    const uint32_t middle = b.next_round();
    EXPECT_EQ(middle, 1u);
    ASSERT_TRUE(b.within(groups, me, [&](int32_t rank, int32_t size) {
                   const CompressedLayout layout({{5000, 0}}, static_cast<uint32_t>(size), 8,
                                                 Granularity::kFlat, 0);
                   const uint8_t in_place[] = {0};
                   emit_compressed_collective(b, rank, layout, {}, in_place, 256 * 1024);
                   return ok_status();
                 }).ok());
    EXPECT_EQ(b.next_round(), middle + 2);
    plans.push_back(b.take());
  }
  EXPECT_TRUE(plans[2].steps.empty());
  EXPECT_TRUE(plans[2].slots.empty());
  expect_matched(plans);
}

// A collective of the transport's own is one of all ranks.
TEST(GroupPlan, NoGroupUsesNativeCollectives) {
  const RankGroup all = {0, 1};
  PlanBuilder b;
  CollectiveRequest request = request_of(OpKind::kAllGather, 10, 0, 2);
  request.native = kNativeMoves;
  ASSERT_TRUE(b.within({&all, 1}, 0, [&](int32_t, int32_t) {
                 return emit_collective(b, request).status();
               }).ok());
  const auto native = [](const Step& step) {
    return step.message() != nullptr && step.message()->native != nullptr;
  };
  EXPECT_TRUE(std::ranges::none_of(b.take().steps, native));
  PlanBuilder plain;
  ASSERT_TRUE(emit_collective(plain, request).ok());
  EXPECT_TRUE(std::ranges::any_of(plain.take().steps, native));
}

TEST(GroupPlan, AnErrorOfAnEmitterIsOneOfThePlan) {
  const std::vector<RankGroup> groups = {{0, 1}, {2, 3, 4}};
  for (int32_t me = 0; me < 6; ++me) {
    PlanBuilder b;
    const Status status = b.within(groups, me, [](int32_t, int32_t size) {
      return size == 3 ? error(Code::kInternal, "three are too many") : ok_status();
    });
    EXPECT_EQ(status.code(), Code::kInternal) << me;
    EXPECT_TRUE(b.of_all_ranks());
  }
}

}  // namespace
}  // namespace sotto::test
