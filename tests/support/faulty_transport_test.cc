#include "tests/support/faulty_transport.h"

#include <bit>
#include <numeric>

#include "tests/conformance/transport_suite.h"
#include "transports/inproc/inproc_backend.h"

namespace sotto::test {
namespace {

// Every rank has a state of its own; rank 0's faults alone are scripted.
TransportCase faulty(const FaultScript& script, std::shared_ptr<FaultState> state) {
  return {"faulty", [script, state](const Clock& clock) -> Result<std::unique_ptr<Backend>> {
            return make_faulty_backend(make_inproc_backend(clock).take(), script, state);
          }};
}

// Rank 0 sends three messages to rank 1. What rank 1 has received, after a while.
struct Outcome {
  std::vector<std::vector<uint8_t>> received;
  std::vector<Status> statuses;  // of the receives that were completed
  size_t sends_completed = 0;
  std::vector<Status> failures;  // rank 0's
  uint64_t faults = 0;
};

constexpr uint64_t kMessageBytes = 1000;

Outcome send_three(FaultKind kind, uint64_t which) {
  Outcome outcome;
  outcome.received.assign(3, std::vector<uint8_t>(kMessageBytes));
  std::vector<uint8_t> data(kMessageBytes);
  std::iota(data.begin(), data.end(), uint8_t{0});
  auto state = std::make_shared<FaultState>();
  EXPECT_EQ(
      run_group(faulty({.seed = 3, .faults = {{kind, which}}}, state), 2,
                [&](RankKit& kit) {
                  TestOp op(7, 0);
                  check(kit.transport->post_op(op.descriptor));
                  for (uint32_t i = 0; i < 3; ++i) {
                    auto* memory = kit.rank == 0 ? data.data() : outcome.received[i].data();
                    kit.start(op.add(kit.rank == 0, 1 - kit.rank, 0, i, memory, kMessageBytes));
                  }
                  kit.drive([&] { return kit.sink.done.size() == 3; }, 3'000'000);
                  kit.barrier();
                  kit.transport->cancel(op.descriptor);
                  if (kit.rank == 0) {
                    outcome.sends_completed = kit.sink.done.size();
                    for (const auto& f : kit.sink.failures) outcome.failures.push_back(f.status);
                  } else {
                    for (const auto& d : kit.sink.done) outcome.statuses.push_back(d.status);
                  }
                }),
      "");
  outcome.faults = state->faults;
  EXPECT_EQ(state->sends, 3u);
  return outcome;
}

uint64_t wrong_bits(const std::vector<uint8_t>& received) {
  uint64_t n = 0;
  for (size_t i = 0; i < received.size(); ++i) {
    n += static_cast<uint64_t>(
        std::popcount(static_cast<uint8_t>(received[i] ^ static_cast<uint8_t>(i))));
  }
  return n;
}

TEST(FaultyTransport, ADroppedMessageNeverArrives) {
  const Outcome o = send_three(FaultKind::kDrop, 1);
  EXPECT_EQ(o.faults, 1u);
  EXPECT_EQ(o.statuses.size(), 2u);
  EXPECT_EQ(o.sends_completed, 2u);
  EXPECT_EQ(wrong_bits(o.received[0]), 0u);
  EXPECT_NE(wrong_bits(o.received[1]), 0u);
  EXPECT_EQ(wrong_bits(o.received[2]), 0u);
}

TEST(FaultyTransport, AFlippedBitIsOneBit) {
  const Outcome o = send_three(FaultKind::kFlipBit, 2);
  EXPECT_EQ(o.faults, 1u);
  EXPECT_EQ(o.statuses.size(), 3u);
  EXPECT_EQ(o.sends_completed, 3u);
  EXPECT_EQ(wrong_bits(o.received[1]), 0u);
  EXPECT_EQ(wrong_bits(o.received[2]), 1u);
}

TEST(FaultyTransport, ATruncatedMessageIsAProtocolError) {
  const Outcome o = send_three(FaultKind::kTruncate, 0);
  ASSERT_EQ(o.statuses.size(), 3u);
  int errors = 0;
  for (const Status& s : o.statuses) errors += s.code() == Code::kProtocol ? 1 : 0;
  EXPECT_EQ(errors, 1);
}

TEST(FaultyTransport, ALostPeerIsReported) {
  const Outcome o = send_three(FaultKind::kLosePeer, 0);
  ASSERT_EQ(o.failures.size(), 1u);
  EXPECT_EQ(o.failures[0].code(), Code::kPeerLost);
}

TEST(FaultyTransport, DelaysChangeTheOrderOnly) {
  std::vector<size_t> order;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    auto state = std::make_shared<FaultState>();
    EXPECT_EQ(run_group(faulty({.seed = seed, .max_delay_polls = 10}, state), 2,
                        [&](RankKit& kit) {
                          TestOp op(7, 0);
                          check(kit.transport->post_op(op.descriptor));
                          std::vector<uint32_t> data(16);
                          for (uint32_t i = 0; i < 16; ++i) {
                            if (kit.rank == 0) data[i] = i * 3;
                            kit.start(op.add(kit.rank == 0, 1 - kit.rank, 0, i, &data[i], 4));
                          }
                          kit.await_transfers(16);
                          for (uint32_t i = 0; i < 16; ++i) require(data[i] == i * 3, "wrong data");
                          if (kit.rank == 1) {
                            for (const auto& d : kit.sink.done)
                              order.push_back(d.transfer->segment);
                          }
                          kit.transport->complete(op.descriptor);
                          kit.finish();
                        }),
              "");
  }
  ASSERT_EQ(order.size(), 320u);
  EXPECT_FALSE(std::is_sorted(order.begin(), order.begin() + 16));
}

}  // namespace
}  // namespace sotto::test
