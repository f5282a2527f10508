#include "tests/conformance/transport_suite.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

namespace sotto::test {
namespace {

TEST_P(TransportSuite, MessagesOfEverySizeBetweenAllPairs) {
  for (const int size : {1, 2, 3, 4, 7, 8}) {
    std::vector<TestMessage> messages;
    for (uint32_t s = 0; s < static_cast<uint32_t>(size); ++s) {
      for (uint32_t d = 0; d < static_cast<uint32_t>(size); ++d) {
        uint32_t segment = 0;
        if (s == d) continue;
        for (const uint64_t bytes : {0, 1, 7, 4096, 65535, 65536, 65537, 300001}) {
          messages.push_back({0, s, d, 0, segment++, bytes});
        }
      }
    }
    EXPECT_EQ(run_group(GetParam(), size,
                        [&](RankKit& kit) {
                          for (const uint64_t seed : {1, 2})
                            run_messages(kit, messages, 1, seed, seed);
                          kit.finish();
                        }),
              "")
        << size << " ranks";
  }
}

TEST_P(TransportSuite, ManyOperationsInFlightInAnyOrder) {
  constexpr uint32_t kRanks = 3;
  std::mt19937_64 random(5);
  std::vector<TestMessage> messages;
  for (uint64_t op = 0; op < 20; ++op) {
    for (uint32_t segment = 0; segment < 12; ++segment) {
      const auto source = static_cast<uint32_t>(random() % kRanks);
      const auto destination =
          static_cast<uint32_t>((source + 1 + random() % (kRanks - 1)) % kRanks);
      const uint64_t bytes = random() % 4 == 0 ? random() % 200'000 : random() % 2'000;
      messages.push_back({op, source, destination, segment / 4, segment, bytes});
    }
  }
  EXPECT_EQ(run_group(GetParam(), kRanks,
                      [&](RankKit& kit) {
                        for (uint64_t seed = 0; seed < 5; ++seed)
                          run_messages(kit, messages, 20, seed, 100 + seed);
                        kit.finish();
                      }),
            "");
}

TEST_P(TransportSuite, ALargeMessage) {
  EXPECT_EQ(
      run_group(
          GetParam(), 2,
          [&](RankKit& kit) {
            run_messages(kit, {{0, 0, 1, 0, 0, 20'000'003}, {0, 1, 0, 0, 0, 20'000'003}}, 1, 3);
            kit.finish();
          }),
      "");
}

TEST_P(TransportSuite, CountersCountWhatCrossed) {
  EXPECT_EQ(
      run_group(GetParam(), 2,
                [&](RankKit& kit) {
                  const uint64_t comm = 42;
                  TestOp op(comm, 0);
                  std::vector<uint8_t> data(70'000), scales(12), in(70'000), scales_in(12);
                  const int32_t peer = 1 - kit.rank;
                  check(kit.transport->post_op(op.descriptor));
                  op.add(true, peer, 0, 0, data.data(), data.size());
                  op.add(true, peer, 0, 1, scales.data(), scales.size()).message_class =
                      MessageClass::kMetadata;
                  op.add(false, peer, 0, 0, in.data(), in.size());
                  op.add(false, peer, 0, 1, scales_in.data(), scales_in.size()).message_class =
                      MessageClass::kMetadata;
                  for (Transfer& t : op.transfers) kit.start(t);
                  kit.messages->ready(peer, op.descriptor, 0, in.size());
                  kit.await_transfers(4);
                  const TransferCounters c = kit.transport->counters(comm, peer);
                  const uint64_t headers = 12 + kit.transport->header_bytes(data.size()) +
                                           kit.transport->header_bytes(scales.size());
                  EXPECT_EQ(c.payload_bytes_sent, data.size());
                  EXPECT_EQ(c.payload_bytes_received, data.size());
                  EXPECT_EQ(c.header_bytes_sent, headers);
                  EXPECT_EQ(c.header_bytes_received, headers);
                  EXPECT_EQ(c.messages_sent, 2u);
                  EXPECT_EQ(c.messages_received, 2u);
                  EXPECT_EQ(kit.transport->counters(comm + 1, peer).messages_sent, 0u);
                  EXPECT_FALSE(kit.transport->route(peer).empty());
                  kit.transport->complete(op.descriptor);
                  kit.finish();
                }),
      "");
}

void expect_mismatch(const RankKit& kit, const std::vector<std::string>& words) {
  require(!kit.sink.failures.empty(), fmt::format("rank {} heard of no failure", kit.rank));
  const Status& status = kit.sink.failures[0].status;
  EXPECT_EQ(status.code(), Code::kProtocol);
  for (const std::string& word : words)
    EXPECT_NE(status.text().find(word), std::string::npos) << status.text();
}

TEST_P(TransportSuite, AMessageOfAnotherOperationIsAProtocolErrorWithoutAnyReceive) {
  for (const bool sender_first : {true, false}) {
    RankBarrier barrier(2);
    EXPECT_EQ(
        run_group(GetParam(), 2,
                  [&](RankKit& kit) {
                    TestOp op(7, 0, kit.rank == 0 ? 11 : 22);
                    if (kit.rank == (sender_first ? 1 : 0)) barrier.wait();
                    check(kit.transport->post_op(op.descriptor));
                    std::vector<uint8_t> data(100);
                    if (kit.rank == 0)
                      kit.messages->send(op.add(true, 1, 0, 0, data.data(), data.size()));
                    if (kit.rank == (sender_first ? 0 : 1)) {
                      kit.backend->poller().poll(0);
                      barrier.wait();
                    }
                    kit.drive([&] { return !kit.sink.failures.empty(); },
                              kit.rank == 1 ? 20'000'000 : 200'000);
                    if (kit.rank == 1)
                      expect_mismatch(kit, {"rank 0", "rank 1", "tag 11", "tag 22", "all_reduce"});
                    kit.barrier();
                    kit.transport->cancel(op.descriptor);
                  }),
        "");
  }
}

TEST_P(TransportSuite, AReceiveThatThePeerDoesNotKnowIsAProtocolError) {
  EXPECT_EQ(run_group(GetParam(), 2,
                      [&](RankKit& kit) {
                        TestOp op(7, 3, kit.rank == 0 ? 11 : 22);
                        check(kit.transport->post_op(op.descriptor));
                        std::vector<uint8_t> data(1 << 20);
                        if (kit.rank == 1) {
                          kit.messages->recv(op.add(false, 0, 0, 0, data.data(), data.size()));
                          kit.messages->ready(0, op.descriptor, 0, data.size());
                        }
                        kit.drive([&] { return !kit.sink.failures.empty(); },
                                  kit.rank == 0 ? 20'000'000 : 200'000);
                        if (kit.rank == 0)
                          expect_mismatch(kit, {"operation 3", "tag 11", "tag 22"});
                        kit.barrier();
                        kit.transport->cancel(op.descriptor);
                      }),
            "");
}

TEST_P(TransportSuite, ASizeThatDoesNotFitIsAProtocolError) {
  EXPECT_EQ(
      run_group(GetParam(), 2,
                [&](RankKit& kit) {
                  TestOp op(7, 0);
                  check(kit.transport->post_op(op.descriptor));
                  std::vector<uint8_t> data(2000, 5);
                  if (kit.rank == 0) {
                    kit.messages->send(op.add(true, 1, 0, 0, data.data(), 1000));
                    kit.drive([&] { return !kit.sink.done.empty() || !kit.sink.failures.empty(); },
                              200'000);
                  } else {
                    kit.messages->recv(op.add(false, 0, 0, 0, data.data(), 1004));
                    kit.messages->ready(0, op.descriptor, 0, 1004);
                    kit.drive([&] { return !kit.sink.done.empty() || !kit.sink.failures.empty(); });
                    const Status status = !kit.sink.done.empty()      ? kit.sink.done[0].status
                                          : kit.sink.failures.empty() ? ok_status()
                                                                      : kit.sink.failures[0].status;
                    EXPECT_EQ(status.code(), Code::kProtocol);
                    EXPECT_NE(status.text().find("1000"), std::string::npos) << status.text();
                    EXPECT_NE(status.text().find("1004"), std::string::npos) << status.text();
                  }
                  kit.barrier();
                  kit.transport->cancel(op.descriptor);
                }),
      "");
}

// After cancel the memory is given back at once: a sanitizer, or the wrong bytes, show who still
// touches it.
TEST_P(TransportSuite, CancelledTransfersAreNotTouched) {
  constexpr int kRanks = 3;
  EXPECT_EQ(run_group(GetParam(), kRanks,
                      [&](RankKit& kit) {
                        std::mt19937_64 random(static_cast<uint64_t>(kit.rank));
                        for (uint64_t round = 0; round < 30; ++round) {
                          auto op = std::make_unique<TestOp>(9, round);
                          check(kit.transport->post_op(op->descriptor));
                          std::vector<std::unique_ptr<std::vector<uint8_t>>> memory;
                          for (uint32_t segment = 0; segment < 4; ++segment) {
                            for (int32_t peer = 0; peer < kRanks; ++peer) {
                              if (peer == kit.rank) continue;
                              for (const bool is_send : {true, false}) {
                                memory.push_back(std::make_unique<std::vector<uint8_t>>(20'000));
                                kit.start(op->add(is_send, peer, 0, segment, memory.back()->data(),
                                                  20'000));
                              }
                            }
                          }
                          const uint64_t polls = random() % 4;
                          for (uint64_t i = 0; i < polls; ++i) kit.backend->poller().poll(50);
                          kit.transport->cancel(op->descriptor);
                          const size_t heard = kit.sink.done.size();
                          const Transfer* const first = &op->transfers.front();
                          memory.clear();
                          op.reset();
                          for (int i = 0; i < 3; ++i) kit.backend->poller().poll(20);
                          for (size_t i = heard; i < kit.sink.done.size(); ++i) {
                            EXPECT_NE(kit.sink.done[i].transfer, first)
                                << "on_transfer after cancel";
                          }
                          EXPECT_EQ(kit.sink.done.size(), heard);
                        }
                      }),
            "");
}

TEST_P(TransportSuite, WakeEndsAPoll) {
  RankKit kit(GetParam(), 0, 1);
  Poller& poller = kit.backend->poller();
  const int64_t begin = Clock::monotonic().now_ns();
  std::thread other([&] { poller.wake(); });
  poller.poll(30'000'000);
  other.join();
  poller.wake();
  // A wake before the poll counts, too; at most one of these two waits a little.
  poller.poll(30'000'000);
  EXPECT_LT(Clock::monotonic().now_ns() - begin, 20'000'000'000);
  const int64_t before = Clock::monotonic().now_ns();
  poller.poll(0);
  EXPECT_FALSE(poller.poll(2'000));
  EXPECT_LT(Clock::monotonic().now_ns() - before, 10'000'000'000);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TransportSuite);

}  // namespace
}  // namespace sotto::test
