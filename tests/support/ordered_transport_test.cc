#include "tests/support/ordered_transport.h"

#include <numeric>

#include "tests/conformance/transport_suite.h"
#include "transports/inproc/inproc_backend.h"

namespace sotto::test {
namespace {

TransportCase ordered(uint64_t seed) {
  return {"ordered", [seed](const Clock& clock) -> Result<std::unique_ptr<Backend>> {
            return make_ordered_backend(make_inproc_backend(clock).take(), seed);
          }};
}

struct Group {
  std::vector<Transfer*> transfers;
  void issue(RankKit& kit) const { check(kit.queue->issue(transfers, nullptr, 0), "issue"); }
};

// A round in which everybody sends a number to everybody.
struct Round {
  Round(RankKit& kit, TestOp& op, uint32_t round)
      : out(static_cast<size_t>(kit.size)), in(out.size()) {
    for (int32_t peer = 0; peer < kit.size; ++peer) {
      if (peer == kit.rank) continue;
      const auto p = static_cast<size_t>(peer);
      out[p] = round * 100 + static_cast<uint32_t>(kit.rank * 10 + peer);
      group.transfers.push_back(&op.add(true, peer, round, 0, &out[p], 4));
      group.transfers.push_back(&op.add(false, peer, round, 0, &in[p], 4));
    }
  }
  void verify(const RankKit& kit, uint32_t round) const {
    for (int32_t peer = 0; peer < kit.size; ++peer) {
      if (peer == kit.rank) continue;
      require(in[static_cast<size_t>(peer)] ==
                  round * 100 + static_cast<uint32_t>(peer * 10 + kit.rank),
              fmt::format("round {}: number of rank {}", round, peer));
    }
  }
  std::vector<uint32_t> out, in;
  Group group;
};

void expect_protocol_error(RankKit& kit) {
  require(kit.drive([&] { return !kit.sink.failures.empty(); }),
          fmt::format("rank {} heard of no failure", kit.rank));
  EXPECT_EQ(kit.sink.failures[0].status.code(), Code::kProtocol)
      << kit.sink.failures[0].status.text();
}

TEST(OrderedTransport, RoundsInOrderArrive) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    EXPECT_EQ(
        run_group(ordered(seed), 4,
                  [&](RankKit& kit) {
                    TestOp op(7, 0);
                    std::deque<Round> rounds;
                    for (uint32_t r = 0; r < 10; ++r)
                      rounds.emplace_back(kit, op, r).group.issue(kit);
                    kit.await_transfers(60);
                    for (uint32_t r = 0; r < 10; ++r) rounds[r].verify(kit, r);
                    EXPECT_EQ(kit.transport->counters(7, (kit.rank + 1) % 4).payload_bytes_received,
                              40u);
                    EXPECT_EQ(kit.transport->counters(7, (kit.rank + 1) % 4).messages_sent, 10u);
                    kit.finish();
                  }),
        "");
  }
  EXPECT_TRUE(take_ordered_violations().empty());
}

TEST(OrderedTransport, OperationsInAnotherOrderAreReportedOnBothRanks) {
  EXPECT_EQ(run_group(ordered(1), 2,
                      [&](RankKit& kit) {
                        TestOp first(7, 0),
                            second(8, 0);  // two comms: each rank alone does nothing wrong
                        Round a(kit, first, 0), b(kit, second, 0);
                        (kit.rank == 0 ? a : b).group.issue(kit);
                        (kit.rank == 0 ? b : a).group.issue(kit);
                        expect_protocol_error(kit);
                        kit.barrier();
                        kit.transport->cancel(first.descriptor);
                        kit.transport->cancel(second.descriptor);
                      }),
            "");
  const auto found = take_ordered_violations();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_NE(found[0].find("comm 7"), std::string::npos) << found[0];
  EXPECT_NE(found[0].find("comm 8"), std::string::npos) << found[0];
}

TEST(OrderedTransport, GroupsThatWaitForEachOtherAreReported) {
  EXPECT_EQ(run_group(ordered(1), 2,
                      [&](RankKit& kit) {
                        TestOp op(7, 0);
                        uint32_t out = 1, in = 0;
                        const int32_t peer = 1 - kit.rank;
                        // Both receive first: neither comes to its send.
                        const Group receive{{&op.add(false, peer, 0, 0, &in, 4)}};
                        const Group send{{&op.add(true, peer, 1, 0, &out, 4)}};
                        receive.issue(kit);
                        send.issue(kit);
                        expect_protocol_error(kit);
                        kit.barrier();
                        kit.transport->cancel(op.descriptor);
                      }),
            "");
  EXPECT_EQ(take_ordered_violations().size(), 1u);
}

TEST(OrderedTransport, RoundsThatDescendAreReported) {
  EXPECT_EQ(run_group(ordered(1), 2,
                      [&](RankKit& kit) {
                        TestOp op(7, 0);
                        Round late(kit, op, 1), early(kit, op, 0);
                        late.group.issue(kit);
                        early.group.issue(kit);
                        expect_protocol_error(kit);
                        kit.barrier();
                        kit.transport->cancel(op.descriptor);
                      }),
            "");
  EXPECT_FALSE(take_ordered_violations().empty());
}

TEST(OrderedTransport, OperationsOfACommThatDescendAreReported) {
  EXPECT_EQ(run_group(ordered(1), 2,
                      [&](RankKit& kit) {
                        TestOp second(7, 1), first(7, 0);
                        Round late(kit, second, 0), early(kit, first, 0);
                        late.group.issue(kit);
                        early.group.issue(kit);
                        expect_protocol_error(kit);
                        kit.barrier();
                        kit.transport->cancel(first.descriptor);
                        kit.transport->cancel(second.descriptor);
                      }),
            "");
  EXPECT_FALSE(take_ordered_violations().empty());
}

TEST(OrderedTransport, ARoundInTwoGroupsIsReported) {
  EXPECT_EQ(run_group(ordered(1), 2,
                      [&](RankKit& kit) {
                        TestOp op(7, 0);
                        Round whole(kit, op, 0);
                        for (Transfer* t : whole.group.transfers) Group{{t}}.issue(kit);
                        expect_protocol_error(kit);
                        kit.barrier();
                        kit.transport->cancel(op.descriptor);
                      }),
            "");
  EXPECT_FALSE(take_ordered_violations().empty());
}

TEST(OrderedTransport, SizesThatDifferAreReported) {
  EXPECT_EQ(run_group(ordered(1), 2,
                      [&](RankKit& kit) {
                        TestOp op(7, 0);
                        uint64_t data = 0;
                        const Group group{{&op.add(kit.rank == 0, 1 - kit.rank, 0, 0, &data,
                                                   kit.rank == 0 ? 4 : 8)}};
                        group.issue(kit);
                        expect_protocol_error(kit);
                        kit.barrier();
                        kit.transport->cancel(op.descriptor);
                      }),
            "");
  const auto found = take_ordered_violations();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_NE(found[0].find("4 bytes"), std::string::npos) << found[0];
  EXPECT_NE(found[0].find("8 bytes"), std::string::npos) << found[0];
}

TEST(OrderedTransport, CancelledTransfersAreNotTouched) {
  EXPECT_EQ(run_group(ordered(1), 3,
                      [&](RankKit& kit) {
                        auto op = std::make_unique<TestOp>(7, 0);
                        auto first = std::make_unique<Round>(kit, *op, 0);
                        first->group.issue(kit);
                        if (kit.rank != 0) kit.backend->poller().poll(100);
                        kit.transport->cancel(op->descriptor);
                        const size_t heard = kit.sink.done.size();
                        first.reset();
                        op.reset();
                        kit.drive([] { return false; }, 5'000);
                        EXPECT_EQ(kit.sink.done.size(), heard);
                        kit.barrier();
                      }),
            "");
  EXPECT_TRUE(take_ordered_violations().empty());
}

TEST(OrderedTransport, TakesGroupsAlone) {
  EXPECT_EQ(run_group(ordered(1), 1,
                      [&](RankKit& kit) {
                        require(kit.queue != nullptr && kit.messages == nullptr,
                                "send is not for this transport");
                      }),
            "");
}

}  // namespace
}  // namespace sotto::test
