// The tables and queues of transports that are made of frame carriers.
#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <set>

#include "transports/framed/op_table.h"
#include "transports/framed/send_queue.h"

namespace sotto::framed {
namespace {

TEST(NumberSet, HoldsWhatWasInserted) {
  std::mt19937_64 random(3);
  NumberSet set;
  std::set<uint64_t> reference;
  for (int i = 0; i < 3000; ++i) {
    const uint64_t n = random() % 500;
    set.insert(n);
    reference.insert(n);
    const uint64_t probe = random() % 500;
    ASSERT_EQ(set.contains(probe), reference.contains(probe)) << i;
  }
  for (uint64_t n = 0; n < 500; ++n) ASSERT_EQ(set.contains(n), reference.contains(n));
}

Transfer message(const OpPosting& op, uint64_t bytes, uint32_t segment,
                 MessageClass message_class = MessageClass::kPayload) {
  Transfer t;
  t.op = &op;
  t.bytes = bytes;
  t.segment = segment;
  t.message_class = message_class;
  return t;
}

TEST(SendQueue, SmallBeforeBulkThenPriorityThenOrder) {
  OpPosting low, high;
  low.priority = -1;
  high.priority = 5;
  std::deque<Transfer> all = {message(low, 100'000, 0),
                              message(high, 100'000, 1),
                              message(low, 100'000, 2),
                              message(high, 100'000, 3),
                              message(low, 10, 4),
                              message(high, 10, 5),
                              message(low, 50'000, 6, MessageClass::kMetadata)};
  SendQueue queue;
  EXPECT_TRUE(queue.empty());
  for (Transfer& t : all) queue.push(t);
  std::vector<uint32_t> order;
  while (Transfer* t = queue.pop()) order.push_back(t->segment);
  EXPECT_EQ(order, (std::vector<uint32_t>{5, 4, 6, 1, 3, 0, 2}));
  EXPECT_TRUE(queue.empty());
}

TEST(SendQueue, RemoveTakesAllOfOneOperation) {
  OpPosting a, b;
  b.key.number = 1;
  std::deque<Transfer> all = {message(a, 10, 0), message(b, 10, 1), message(a, 1 << 20, 2),
                              message(b, 1 << 20, 3)};
  SendQueue queue;
  for (Transfer& t : all) queue.push(t);
  queue.remove(a);
  EXPECT_EQ(queue.pop()->segment, 1u);
  EXPECT_EQ(queue.pop()->segment, 3u);
  EXPECT_EQ(queue.pop(), nullptr);
}

TEST(OpTable, FlowsAreFoundAndForgotten) {
  OpTable table;
  table.set_peers(3);
  OpPosting op;
  op.key = {9, 4};
  Flow& one = table.flow(op.key, 1);
  Flow& two = table.flow(op.key, 2);
  EXPECT_EQ(table.unposted(), 1u);
  EXPECT_EQ(&table.flow(op.key, 1), &one);
  EXPECT_EQ(one.op, two.op);
  table.post(op);
  EXPECT_EQ(table.unposted(), 0u);
  EXPECT_EQ(table.flows_of(1), &one);
  Unexpected* message = table.make_unexpected(100);
  two.unexpected = message;
  EXPECT_FALSE(table.done(op.key));
  table.erase(*table.find_op(op.key), true);
  EXPECT_TRUE(table.done(op.key));
  EXPECT_FALSE(table.done({9, 5}));
  EXPECT_FALSE(table.done({8, 4}));
  EXPECT_EQ(table.find(op.key, 1), nullptr);
  EXPECT_EQ(table.flows_of(1), nullptr);
  EXPECT_EQ(table.recent(op.key), op.signature);
}

TEST(OpTable, PointToPointNumbersHaveSpacesOfTheirOwn) {
  OpTable table;
  table.set_peers(3);
  OpPosting op;
  op.key = {1, p2p_number(0, 2, 5)};
  table.erase(table.post(op), true);
  EXPECT_TRUE(table.done(op.key));
  EXPECT_FALSE(table.done({1, 5}));
  EXPECT_FALSE(table.done({1, p2p_number(0, 1, 5)}));
  EXPECT_FALSE(table.done({1, p2p_number(2, 0, 5)}));
}

}  // namespace
}  // namespace sotto::framed
