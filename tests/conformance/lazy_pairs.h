// What the tests of connections that are made when they are first used share.
#pragma once

#include <gmock/gmock.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/conformance/transport_suite.h"

namespace sotto::test {

// A group whose pairs are all lazy, as far as the transport makes them so.
inline std::string run_lazy(const TransportCase& which, int size,
                            const std::function<void(RankKit&)>& body) {
  IdBoard board(size);
  return run_ranks(size, [&](int rank) {
    RankKit kit(which, rank, size);
    kit.join(board.share(kit));
    kit.connect(all_ranks(*kit.control));
    body(kit);
    board.wait();
  });
}

// One message, in an operation of its own.
struct Message {
  Message(RankKit& kit, uint64_t number, int32_t from, int32_t to, uint64_t bytes)
      : op(7, number), memory(bytes), kit_(kit) {
    const bool sends = kit.rank == from;
    if (sends) fill_message(memory, 0, 0, 0, static_cast<uint32_t>(number));
    check(kit.transport->post_op(op.descriptor));
    transfer = &op.add(sends, sends ? to : from, 0, 0, memory.data(), bytes);
  }
  void start() {
    kit_.start(*transfer);
    if (!transfer->is_send) kit_.messages->ready(transfer->peer, op.descriptor, 0, memory.size());
  }
  void verify(uint64_t number) {
    std::vector<uint8_t> expected(memory.size());
    fill_message(expected, 0, 0, 0, static_cast<uint32_t>(number));
    EXPECT_EQ(memory, expected);
    kit_.transport->complete(op.descriptor);
  }

  TestOp op;
  std::vector<uint8_t> memory;
  Transfer* transfer;

 private:
  RankKit& kit_;
};

// Long and short messages between all pairs, in both directions.
inline std::vector<TestMessage> messages_of_all_pairs(uint32_t size) {
  std::vector<TestMessage> messages;
  for (uint32_t a = 0; a < size; ++a) {
    for (uint32_t b = 0; b < size; ++b) {
      if (a == b) continue;
      messages.push_back({0, a, b, 0, 0, 10});
      messages.push_back({0, a, b, 0, 1, 300'000});
    }
  }
  return messages;
}

// Rank 2 sends in an operation that is another one on rank 1, where it has nothing to do with
// rank 2. Of three ranks.
inline void expect_mismatch_seen(RankKit& kit) {
  kit.barrier();
  kit.control->established();
  TestOp op(7, 0);
  std::vector<uint8_t> memory(1'000'000);
  op.descriptor.signature.count = kit.rank == 2 ? 250'000 : 1;
  if (kit.rank != 0) check(kit.transport->post_op(op.descriptor));
  if (kit.rank == 2) kit.start(op.add(true, 1, 0, 0, memory.data(), memory.size()));
  if (kit.rank == 1) {
    require(kit.drive([&] { return !kit.sink.failures.empty(); }), "the mismatch was not noticed");
    EXPECT_THAT(kit.sink.failures[0].status.text(),
                testing::AllOf(testing::HasSubstr("250000 elements"),
                               testing::HasSubstr(" 1 element,"), testing::HasSubstr("rank 2")));
  }
  kit.barrier();
  if (kit.rank != 0) kit.transport->cancel(op.descriptor);
}

}  // namespace sotto::test
