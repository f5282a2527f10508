// Plans whose messages are moved by collectives of the transport: what is native, the bytes per
// peer, and what the steps touch.
#include "core/plan/native.h"

#include <gtest/gtest.h>

#include "core/plan/collectives.h"
#include "tests/support/lowering.h"

namespace sotto::test {
namespace {

constexpr int32_t kRanks = 3;
constexpr uint64_t kCount = 1000;

CollectiveRequest request_of(OpKind kind, NativeCollectives native, Dtype dtype = Dtype::kF32,
                             ReduceOp reduce = ReduceOp::kSum, size_t tensors = 1) {
  CollectiveRequest request;
  request.kind = kind;
  request.size = kRanks;
  request.reduce = reduce;
  request.native = native;
  for (size_t t = 0; t < tensors; ++t) {
    request.counts.push_back(kCount + t);
    request.dtypes.push_back(dtype);
    request.in_place.push_back(0);
  }
  return request;
}

std::shared_ptr<const Plan> plan_of(CollectiveRequest request, int32_t rank = 0,
                                    const std::function<void(PlanBuilder&)>& and_then = nullptr) {
  request.rank = rank;
  PlanBuilder builder;
  EXPECT_TRUE(emit_collective(builder, request).ok());
  if (and_then) and_then(builder);
  DeviceCaps device;
  TransportCaps transport;
  return lower_for(builder.take(), device, transport, Matching::kByOrder, request.size).take();
}

// How many calls of the transport the plan makes; -1: some messages go on their own.
int calls(const CollectiveRequest& request) {
  const auto plan = plan_of(request);
  int count = 0;
  const NativeStep* last = nullptr;
  for (const Step& step : plan->steps) {
    const MessageStep* const message = step.message();
    if (message == nullptr || message->native == nullptr) return -1;
    count += message->native != last ? 1 : 0;
    last = message->native;
  }
  return count;
}

TEST(NativePlan, WhatIsNative) {
  const NativeCollectives exact = kNativeMoves | kNativeIntegers, all = exact | kNativeFloats;
  for (const OpKind move : {OpKind::kAllGather, OpKind::kBroadcast}) {
    EXPECT_EQ(calls(request_of(move, 0)), -1);
    EXPECT_EQ(calls(request_of(move, exact)), 1);
    EXPECT_EQ(calls(request_of(move, exact, Dtype::kBF16, ReduceOp::kSum, 64)), 64);
    EXPECT_EQ(calls(request_of(move, exact, Dtype::kBF16, ReduceOp::kSum, 65)), -1);
  }
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter}) {
    EXPECT_EQ(calls(request_of(kind, exact)), -1);
    EXPECT_EQ(calls(request_of(kind, all)), 1);
    EXPECT_EQ(calls(request_of(kind, all, Dtype::kF16, ReduceOp::kMean)), 1);
    EXPECT_EQ(calls(request_of(kind, exact, Dtype::kU8, ReduceOp::kMax)), 1);
    EXPECT_EQ(calls(request_of(kind, all, Dtype::kI32, ReduceOp::kMean)), -1);
    EXPECT_EQ(calls(request_of(kind, all, Dtype::kI32, ReduceOp::kBitOr)), -1);
  }
  for (const OpKind other : {OpKind::kAllToAll, OpKind::kGather, OpKind::kScatter})
    EXPECT_EQ(calls(request_of(other, all)), -1);
  CollectiveRequest alone = request_of(OpKind::kAllGather, all);
  alone.size = 1;
  EXPECT_EQ(plan_of(alone)->messages.transfers, 0u);
}

// The bytes per pair of ranks are those of messages, and what one sends the other expects.
TEST(NativePlan, BytesPerPeer) {
  for (const OpKind kind :
       {OpKind::kAllGather, OpKind::kBroadcast, OpKind::kReduceScatter, OpKind::kAllReduce}) {
    std::vector<std::shared_ptr<const Plan>> plans;
    for (int32_t rank = 0; rank < kRanks; ++rank)
      plans.push_back(plan_of(request_of(kind, ~0u), rank));
    for (size_t a = 0; a < kRanks; ++a) {
      for (size_t b = 0; b < kRanks; ++b) {
        const PeerTraffic &there = plans[a]->traffic.peers[b], &back = plans[b]->traffic.peers[a];
        EXPECT_EQ(there.payload_bytes_sent, back.payload_bytes_received);
        EXPECT_EQ(there.messages_sent, back.messages_received);
      }
      // A share of all-reduce has a multiple of 16 elements but for the last one.
      const uint64_t own = a == 2 ? 328 : 336;
      const uint64_t sent = kind == OpKind::kBroadcast   ? (a == 0 ? 2 * kCount : 0)
                            : kind == OpKind::kAllReduce ? kCount + own
                                                         : 2 * kCount;
      EXPECT_EQ(plans[a]->traffic.total.payload_bytes_sent, 4 * sent) << static_cast<int>(kind);
    }
  }
}

// All messages of a call start at once, although they touch the same memory, and what reads the
// result or overwrites the source comes after the first of them, which stands for the call.
TEST(NativePlan, OneCallInTheOrderOfThePlan) {
  const auto plan = plan_of(request_of(OpKind::kAllReduce, ~0u), 0, [](PlanBuilder& b) {
    const uint32_t copy = b.scratch(4);
    b.copy({copy, 0, 4}, {1, 4 * (kCount - 1), 4});  // the last element of the output
    b.fill({0, 0, 4}, 0);                            // the first of the input
  });
  const auto steps = static_cast<uint32_t>(plan->steps.size());
  ASSERT_EQ(steps, plan->messages.transfers + 2);
  ASSERT_EQ(plan->messages.groups.size(), 1u);
  for (uint32_t i = 0; i + 2 < steps; ++i) EXPECT_TRUE(plan->order.preds(i).empty());
  for (const uint32_t after : {steps - 2, steps - 1}) {
    ASSERT_EQ(plan->order.preds(after).size(), 1u);
    EXPECT_EQ(plan->order.preds(after)[0], 0u);
  }
}

}  // namespace
}  // namespace sotto::test
