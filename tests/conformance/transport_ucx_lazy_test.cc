// UCX's endpoints that are made when they are first used: of all pairs, also with the coordinator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "tests/conformance/lazy_pairs.h"
#include "tests/conformance/ucx_case.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr const char* kNotYet = "ucx (connects when it is first used)";

std::string run_lazy(int size, const std::function<void(RankKit&)>& body) {
  return run_lazy(over_ucx(), size, body);
}

bool connected(const RankKit& kit, int32_t peer) { return kit.transport->route(peer) != kNotYet; }

// Messages between two of four ranks, from the lower or the higher one, short and long.
TEST(UcxLazy, APairConnectsAtItsFirstMessage) {
  for (const uint64_t bytes : {4ull, 3'000'000ull}) {
    for (const int32_t from : {1, 3}) {
      SCOPED_TRACE(fmt::format("{} bytes from {}", bytes, from));
      EXPECT_EQ(
          run_lazy(4,
                   [&](RankKit& kit) {
                     for (int32_t peer = 0; peer < 4; ++peer) {
                       if (peer == kit.rank) continue;
                       EXPECT_EQ(kit.transport->route(peer), kNotYet);
                     }
                     kit.barrier();
                     const int32_t to = 4 - from;
                     if (kit.rank == from || kit.rank == to) {
                       Message message(kit, 0, from, to, bytes);
                       message.start();
                       kit.await_transfers(1);
                       message.verify(0);
                       EXPECT_THAT(kit.transport->route(4 - kit.rank), StartsWith("ucx tcp/"));
                     }
                     kit.barrier();
                     for (int32_t peer = 0; peer < 4; ++peer) {
                       const bool used =
                           (kit.rank == from && peer == to) || (kit.rank == to && peer == from);
                       if (peer == kit.rank) continue;
                       EXPECT_EQ(connected(kit, peer), used);
                     }
                     kit.finish();
                   }),
          "");
    }
  }
}

TEST(UcxLazy, AllPairsAtOnceFromBothEnds) {
  for (const int size : {5, 8}) {
    const auto messages = messages_of_all_pairs(static_cast<uint32_t>(size));
    for (uint64_t seed = 0; seed < 5; ++seed) {
      EXPECT_EQ(run_lazy(size,
                         [&](RankKit& kit) {
                           run_messages(kit, messages, 1, seed);
                           kit.finish();
                         }),
                "");
    }
  }
}

TEST(UcxLazy, APairThatIsNeverUsedCostsNothing) {
  EXPECT_EQ(run_lazy(3,
                     [&](RankKit& kit) {
                       kit.finish();
                       EXPECT_EQ(kit.transport->counters(0, (kit.rank + 1) % 3).service_bytes_sent,
                                 0u);
                     }),
            "");
}

// Rank 1 would connect, and has no reason to: rank 2 asks it, as soon as the group is set up.
TEST(UcxLazy, ARankThatWaitsAsksForTheConnection) {
  EXPECT_EQ(run_lazy(3,
                     [&](RankKit& kit) {
                       std::optional<Message> message;
                       if (kit.rank == 2) {
                         message.emplace(kit, 0, 2, 1, 1000);
                         message->start();
                       }
                       kit.drive([] { return false; }, 300'000);
                       EXPECT_TRUE(kit.sink.done.empty() || kit.rank != 2);
                       kit.barrier();
                       kit.control->established();
                       if (kit.rank == 2) kit.await_transfers(1);
                       kit.barrier();
                       EXPECT_EQ(connected(kit, (kit.rank + 1) % 3), kit.rank == 1);
                       if (kit.rank == 1) {
                         message.emplace(kit, 0, 2, 1, 1000);
                         message->start();
                         kit.await_transfers(1);
                         message->verify(0);
                       }
                       if (kit.rank == 2) kit.transport->complete(message->op.descriptor);
                       kit.finish();
                     }),
            "");
}

TEST(UcxLazy, OperationsThatDifferAreSeen) { EXPECT_EQ(run_lazy(3, expect_mismatch_seen), ""); }

// By the rank that connects. One that would be connected leaves it to the control plane, and does
// not wait at its end.
TEST(UcxLazy, APeerThatIsGoneIsNamed) {
  RankBarrier barrier(3);
  EXPECT_EQ(
      run_lazy(3,
               [&](RankKit& kit) {
                 if (kit.rank == 1) kit.transport.reset();
                 barrier.wait();
                 if (kit.rank == 0) {
                   Message message(kit, 0, 0, 1, 1000);
                   message.start();
                   require(kit.drive([&] { return !kit.sink.failures.empty(); }),
                           "the connection was not missed");
                   EXPECT_EQ(kit.sink.failures[0].peer, 1);
                   EXPECT_EQ(kit.sink.failures[0].status.code(), Code::kPeerLost);
                   EXPECT_THAT(
                       kit.sink.failures[0].status.text(),
                       AllOf(
                           StartsWith("the connection between rank 0 and rank 1 is lost: rank 0: "),
                           HasSubstr(" rank 1: ")));
                   kit.transport->cancel(message.op.descriptor);
                 }
                 if (kit.rank == 2) {
                   Message message(kit, 0, 2, 1, 1000);
                   message.start();
                   kit.drive([] { return false; }, 200'000);
                   EXPECT_TRUE(kit.sink.failures.empty());
                   kit.transport->cancel(message.op.descriptor);
                 }
                 kit.barrier();
                 if (kit.transport) kit.transport->close(kit.in(300'000));
               }),
      "");
}

// Of a pair that rank 1 never uses.
TEST(UcxLazy, AnEndThatOnlyOneRankHasKeepsNobody) {
  RankBarrier barrier(2);
  EXPECT_EQ(run_lazy(2,
                     [&](RankKit& kit) {
                       std::optional<Message> message;
                       if (kit.rank == 0) {
                         message.emplace(kit, 0, 1, 0, 1000);
                         message->start();
                       }
                       require(kit.drive([&] { return connected(kit, 1 - kit.rank); }), "no way");
                       kit.barrier();
                       if (kit.rank == 0) kit.transport->cancel(message->op.descriptor);
                       const int64_t before = Clock::monotonic().now_ns();
                       kit.transport->close(kit.in(20'000'000));
                       EXPECT_LT(Clock::monotonic().now_ns() - before, 10'000'000'000);
                       barrier.wait();
                       kit.transport.reset();
                       barrier.wait();
                     }),
            "");
}

}  // namespace
}  // namespace sotto::test
