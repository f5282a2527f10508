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

Transfer message(const OpDescriptor& op, uint64_t bytes, uint32_t segment,
                 MessageClass message_class = MessageClass::kPayload) {
  Transfer t;
  t.op = &op;
  t.bytes = bytes;
  t.segment = segment;
  t.message_class = message_class;
  return t;
}

TEST(SendQueue, SmallBeforeBulkThenPriorityThenOrder) {
  OpDescriptor low, high;
  low.priority = -1;
  high.priority = 5;
  std::deque<Transfer> all = {message(low, 100'000, 0),
                              message(high, 100'000, 1),
                              message(low, 100'000, 2),
                              message(high, 100'000, 3),
                              message(low, 10, 4),
                              message(high, 10, 5),
                              message(low, 50'000, 6, MessageClass::kMetadata)};
  SendQueue queue(10);
  EXPECT_TRUE(queue.empty());
  for (Transfer& t : all) queue.push(t);
  std::vector<uint32_t> order;
  while (Transfer* t = queue.pop()) order.push_back(t->segment);
  EXPECT_EQ(order, (std::vector<uint32_t>{5, 4, 6, 1, 3, 0, 2}));
  EXPECT_TRUE(queue.empty());
}

TEST(SendQueue, RemoveTakesAllOfOneOperation) {
  OpDescriptor a, b;
  b.key.number = 1;
  std::deque<Transfer> all = {message(a, 10, 0), message(b, 10, 1), message(a, 1 << 20, 2),
                              message(b, 1 << 20, 3)};
  SendQueue queue(10);
  for (Transfer& t : all) queue.push(t);
  queue.remove(a);
  EXPECT_EQ(queue.pop()->segment, 1u);
  EXPECT_EQ(queue.pop()->segment, 3u);
  EXPECT_EQ(queue.pop(), nullptr);
}

// What leaves a queue in which both have always more to send.
struct Shares {
  uint64_t normal = 0, background = 0;
};
Shares shares_of(uint32_t percent, uint64_t normal_bytes, uint64_t background_bytes) {
  OpDescriptor normal, background;
  background.priority = kBackgroundPriority;
  std::deque<Transfer> all;
  SendQueue queue(percent);
  const auto push = [&](const OpDescriptor& op, uint64_t bytes) {
    queue.push(all.emplace_back(message(op, bytes, 0)));
  };
  push(normal, normal_bytes);
  push(background, background_bytes);
  Shares sent;
  while (sent.normal + sent.background < 100'000'000) {
    const Transfer& t = *queue.pop();
    (t.op == &normal ? sent.normal : sent.background) += t.bytes;
    push(*t.op, t.bytes);
  }
  return sent;
}

TEST(SendQueue, BackgroundBulkGetsItsShareAndNoMore) {
  for (const auto& [normal, background] :
       {std::pair{100'000, 100'000}, {5'000, 300'000}, {400'000, 8'000}}) {
    for (const uint32_t percent : {1, 10, 50, 90}) {
      SCOPED_TRACE(fmt::format("{} %, {} and {} bytes", percent, normal, background));
      const Shares sent =
          shares_of(percent, static_cast<uint64_t>(normal), static_cast<uint64_t>(background));
      EXPECT_NEAR(static_cast<double>(sent.background), percent * 1e6, 1e6);
    }
    EXPECT_EQ(
        shares_of(0, static_cast<uint64_t>(normal), static_cast<uint64_t>(background)).background,
        0u);
  }
}

TEST(SendQueue, BackgroundBulkSavesNothingUpWhileItHasNothingToSend) {
  OpDescriptor normal, background, low;
  background.priority = kBackgroundPriority - 5;
  low.priority = kBackgroundPriority + 1;
  std::deque<Transfer> all;
  SendQueue queue(50);
  const auto push = [&](const OpDescriptor& op) -> Transfer& {
    Transfer& t = all.emplace_back(message(op, 10'000, 0));
    queue.push(t);
    return t;
  };
  for (int i = 0; i < 50; ++i) push(normal);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(queue.pop()->op, &normal);
  // Alone it has the wire for itself, and owes nothing for that.
  push(background), push(background);
  EXPECT_EQ(queue.pop()->op, &background);
  push(normal), push(normal), push(low);
  const OpDescriptor* const order[] = {&normal, &background, &normal, &low};
  for (const OpDescriptor* op : order) EXPECT_EQ(queue.pop()->op, op);
  EXPECT_TRUE(queue.empty());
}

TEST(OpTable, FlowsAreFoundAndForgotten) {
  OpTable table;
  table.set_peers(3);
  OpDescriptor op;
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

TEST(OpTable, OperationsOfCommsThatHaveEndedAreRememberedForSomeTime) {
  OpTable table;
  table.set_peers(2);
  OpDescriptor op;
  for (uint64_t comm = 1; comm <= 3 * OpTable::kLeft; ++comm) {
    op.key = {comm, 0};
    table.erase(table.post(op), true);
    op.key = {comm, p2p_number(0, 1, 0)};
    table.erase(table.post(op), true);
    EXPECT_TRUE(table.leave(comm));
    EXPECT_TRUE(table.done({comm, 0}));
    EXPECT_LE(table.spaces(), 2 * (OpTable::kLeft + 1));
  }
  EXPECT_TRUE(table.done({2 * OpTable::kLeft + 1, 0}));
  EXPECT_FALSE(table.done({2 * OpTable::kLeft - 1, 0}));
  // Comms without operations leave nothing, and take no other's place.
  for (uint64_t comm = 4 * OpTable::kLeft; comm < 6 * OpTable::kLeft; ++comm)
    EXPECT_TRUE(table.leave(comm));
  EXPECT_TRUE(table.done({2 * OpTable::kLeft + 1, p2p_number(0, 1, 0)}));
  // A peer has begun an operation.
  table.flow({7, 0}, 1);
  EXPECT_FALSE(table.leave(7));
}

TEST(OpTable, PointToPointNumbersHaveSpacesOfTheirOwn) {
  OpTable table;
  table.set_peers(3);
  OpDescriptor op;
  op.key = {1, p2p_number(0, 2, 5)};
  table.erase(table.post(op), true);
  EXPECT_TRUE(table.done(op.key));
  EXPECT_FALSE(table.done({1, 5}));
  EXPECT_FALSE(table.done({1, p2p_number(0, 1, 5)}));
  EXPECT_FALSE(table.done({1, p2p_number(2, 0, 5)}));
}

}  // namespace
}  // namespace sotto::framed
