// Direct reductions whose chunks are taken in windows: what a plan keeps in memory, and that ranks
// that hold each other back cannot stop.
#include "core/plan/direct.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "core/plan/collectives.h"
#include "tests/support/lowering.h"

namespace sotto::test {
namespace {

constexpr uint64_t kSegment = 256 * 1024;  // bytes

// Messages are not cut, and one window is in memory.
constexpr uint64_t kUncutSegment = 0;
constexpr HeldWindows kOne{.count = 1, .bytes = 8 << 20};

std::shared_ptr<const Plan> plan_of(OpKind kind, int32_t rank, int32_t size, uint64_t count,
                                    uint64_t segment, Matching matching,
                                    const HeldWindows& held = {}) {
  PlanBuilder builder;
  CollectiveRequest request;
  request.kind = kind;
  request.rank = rank;
  request.size = size;
  request.counts = {count};
  request.dtypes = {Dtype::kF32};
  request.in_place = {1};
  request.segment_bytes = segment;
  request.held = held;
  EXPECT_TRUE(emit_collective(builder, request).ok());
  DeviceCaps device;
  TransportCaps transport;
  return lower_for(builder.take(), device, transport, matching, size).take();
}

using Plans = std::vector<std::shared_ptr<const Plan>>;

Plans plans_of(OpKind kind, int32_t size, uint64_t count, Matching matching, uint64_t segment,
               const HeldWindows& held) {
  Plans plans;
  for (int32_t rank = 0; rank < size; ++rank)
    plans.push_back(plan_of(kind, rank, size, count, segment, matching, held));
  return plans;
}

Plans plans_of(OpKind kind, int32_t size, uint64_t count, Matching matching) {
  return plans_of(kind, size, count, matching, kSegment, {});
}

// Whether all ranks come to the end of their plans, if a message leaves only when its receiver has
// posted all receives from the sender up to the message's round.
class Simulation {
 public:
  explicit Simulation(const Plans& plans) : plans_(plans) {
    for (const auto& plan : plans) done_.emplace_back(plan->steps.size());
  }

  bool ends() {
    for (bool any = true; any;) {
      any = false;
      for (size_t rank = 0; rank < plans_.size(); ++rank) {
        for (uint32_t i = 0; i < plans_[rank]->steps.size(); ++i) any |= advance(rank, i);
      }
    }
    for (const auto& steps : done_) {
      if (std::count(steps.begin(), steps.end(), 0) != 0) return false;
    }
    return true;
  }

 private:
  bool startable(size_t rank, uint32_t i) const {
    const auto before = plans_[rank]->order.preds(i);
    return std::all_of(before.begin(), before.end(), [&](uint32_t b) { return done_[rank][b]; });
  }

  bool advance(size_t rank, uint32_t i) {
    const Step& step = plans_[rank]->steps[i];
    if (done_[rank][i] || !startable(rank, i) || is_receive(step)) return false;
    if (is_send(step) && !deliver(rank, *step.message())) return false;
    done_[rank][i] = 1;
    return true;
  }

  bool deliver(size_t from, const MessageStep& message) {
    const auto to = static_cast<size_t>(message.peer);
    uint32_t place = kNoStep;
    for (uint32_t i = 0; i < plans_[to]->steps.size(); ++i) {
      const MessageStep* const m = plans_[to]->steps[i].message();
      if (m == nullptr || m->is_send || m->peer != static_cast<int32_t>(from) ||
          m->round > message.round)
        continue;
      if (!startable(to, i)) return false;
      if (m->round == message.round && m->segment == message.segment) place = i;
    }
    if (place == kNoStep) return false;
    const MessageStep& receive = *plans_[to]->steps[place].message();
    const uint32_t row = receive.elided_anti_dependency;
    EXPECT_TRUE(row == kNoStep || done_[to][row]) << "a result before its row";
    EXPECT_EQ(receive.data.bytes, message.data.bytes);
    done_[to][place] = 1;
    return true;
  }

  const Plans& plans_;
  std::vector<std::vector<uint8_t>> done_;
};

TEST(DirectPlan, MemoryDoesNotGrowWithTheTensors) {
  constexpr uint64_t kLimit = uint64_t{13} << 20;
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter}) {
    for (const int32_t size : {2, 4, 12}) {
      const uint64_t count = kind == OpKind::kAllReduce ? 25'000'000 : 25'000'000 / size;
      const auto plan = plan_of(kind, 1, size, count, kSegment, Matching::kByKey);
      EXPECT_LE(plan->arenas.scratch, kLimit) << size;
      EXPECT_GE(plan->arenas.scratch, kLimit / 2) << size;
    }
    // A segment of every rank and window at least.
    const auto plan = plan_of(kind, 1, 64, 16'000'000, kSegment, Matching::kByKey);
    EXPECT_LE(plan->arenas.scratch, 4 * 64 * segment_elements(kSegment, 32) * 4);
  }
}

TEST(DirectPlan, RanksThatWaitForEachOthersReceivesComeToTheEnd) {
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter}) {
    for (const int32_t size : {2, 3, 5}) {
      for (const uint64_t count : {16'400u, 2'000'001u, 10'000'003u}) {
        EXPECT_TRUE(Simulation(plans_of(kind, size, count, Matching::kByKey)).ends())
            << size << " ranks, " << count;
        const Plans uncut = plans_of(kind, size, count, Matching::kByKey, kUncutSegment, kOne);
        EXPECT_TRUE(Simulation(uncut).ends()) << size << " ranks, " << count << ", not cut";
      }
    }
  }
}

// One window in memory: its rows, and what is sent of it at once. A round more than there are
// windows.
TEST(DirectPlan, OneWindowOfWholeMessages) {
  for (const int32_t size : {2, 4, 8}) {
    const auto others = static_cast<uint64_t>(size - 1);
    for (const uint64_t windows : {1u, 2u, 5u}) {
      const uint64_t count = kOne.bytes / 4 * windows - 4096;
      const auto reduced =
          plan_of(OpKind::kAllReduce, 1, size, count, kUncutSegment, Matching::kByOrder, kOne);
      EXPECT_EQ(reduced->messages.groups.size(), windows + 1) << size;
      EXPECT_EQ(reduced->traffic.total.messages_sent, 2 * windows * others) << size;
      EXPECT_LE(reduced->arenas.scratch, kOne.bytes + 4096);
      EXPECT_GE(reduced->arenas.scratch, kOne.bytes * 3 / 4);
      const auto parts = plan_of(OpKind::kReduceScatter, 1, size, count / size, kUncutSegment,
                                 Matching::kByOrder, kOne);
      EXPECT_EQ(parts->messages.groups.size(), windows) << size;
      EXPECT_EQ(parts->traffic.total.messages_sent, windows * others) << size;
    }
  }
}

// Results that take the place of rows do not wait until the rows are seen to have left: their
// senders had them before they could make results, and would be kept from starting.
TEST(DirectPlan, ResultsDoNotWaitForTheRowsWhosePlaceTheyTake) {
  const auto plan = plan_of(OpKind::kAllReduce, 0, 4, 10'000'003, kSegment, Matching::kByKey);
  size_t replies = 0;
  for (uint32_t i = 0; i < plan->steps.size(); ++i) {
    const MessageStep* const m = plan->steps[i].message();
    if (m == nullptr || m->elided_anti_dependency == kNoStep) continue;
    ++replies;
    ASSERT_TRUE(is_send(plan->steps[m->elided_anti_dependency]));
    const MessageStep& send = *plan->steps[m->elided_anti_dependency].message();
    EXPECT_EQ(send.peer, m->peer);
    EXPECT_EQ(send.data.offset, m->data.offset);
    for (const uint32_t before : plan->order.preds(i))
      EXPECT_FALSE(is_send(plan->steps[before])) << "step " << i;
  }
  EXPECT_GT(replies, 100u);
}

// Transports that match by order issue a group when all of it can start: nothing in it may wait for
// a message of its own group or a later one, and both ends of a pair have the same messages in it.
TEST(DirectPlan, GroupsFollowEachOther) {
  for (const bool cut : {true, false}) {
    for (const auto& [kind, size] : {std::pair{OpKind::kAllReduce, 2},
                                     {OpKind::kAllReduce, 4},
                                     {OpKind::kReduce, 4},
                                     {OpKind::kReduceScatter, 2},
                                     {OpKind::kReduceScatter, 4}}) {
      const Plans plans =
          cut ? plans_of(kind, size, 10'000'003, Matching::kByOrder)
              : plans_of(kind, size, 20'000'003, Matching::kByOrder, kUncutSegment, kOne);
      std::map<std::tuple<size_t, int32_t, int32_t>, std::vector<uint64_t>> sent, received;
      for (int32_t rank = 0; rank < size; ++rank) {
        const Plan& plan = *plans[rank];
        ASSERT_EQ(plan.messages.groups.size(), plans[0]->messages.groups.size());
        std::vector<size_t> last(plan.steps.size());  // latest group that a step waits for, + 1
        for (uint32_t i = 0; i < plan.steps.size(); ++i) {
          const Step& step = plan.steps[i];
          for (const uint32_t b : plan.order.preds(i)) last[i] = std::max(last[i], last[b]);
          const MessageStep* const m = step.message();
          if (m == nullptr) continue;
          EXPECT_LE(last[i], m->issue_round) << "rank " << rank << " step " << i;
          last[i] = m->issue_round + 1;
          auto& list = m->is_send ? sent : received;
          const auto pair = m->is_send ? std::pair{rank, m->peer} : std::pair{m->peer, rank};
          list[{m->issue_round, pair.first, pair.second}].push_back(m->data.bytes);
        }
      }
      EXPECT_GT(plans[0]->messages.groups.size(), 8u);
      EXPECT_EQ(sent, received);
    }
  }
}

}  // namespace
}  // namespace sotto::test
