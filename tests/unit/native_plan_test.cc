// Plans whose messages are moved by collectives of the transport: what is native, the bytes per
// peer, and what the steps touch.
#include "core/plan/native.h"

#include <gtest/gtest.h>

#include "core/plan/collectives.h"
#include "core/plan/flat_reduce.h"
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

// ---- the all-reduce of optimizers ----

struct Flat {
  std::shared_ptr<const Plan> plan;
  uint32_t in = kNoSlot, out = kNoSlot, flags = kNoSlot;
};

// Of two tensors, whose elements are no multiple of what all ranks get alike.
Flat flat_plan(NativeCollectives native, int32_t rank, bool in_place = false) {
  static const std::vector<uint64_t> counts{kCount, 77};
  const FlatLayout layout = FlatLayout::concatenated(counts, std::vector<uint32_t>{0, 1});
  PlanBuilder b;
  Flat flat;
  FlatReduceRequest request;
  request.rank = rank;
  request.size = kRanks;
  request.layout = &layout;
  request.native = native;
  flat.in = b.bound_list(std::vector<uint64_t>{4 * counts[0], 4 * counts[1]});
  flat.out = b.scratch(flat_reduce_bytes(request));
  flat.flags = b.scratch(4);
  if (in_place) {
    b.alias(flat.in, flat.out, 0);
    b.alias(flat.in + 1, flat.out, 4 * counts[0]);
  }
  request.in_list = flat.in;
  request.out_flat = flat.out;
  request.in_place = in_place;
  request.flags = flat.flags;
  emit_flat_all_reduce(b, request);
  DeviceCaps device;
  TransportCaps transport;
  flat.plan = lower_for(b.take(), device, transport, Matching::kByOrder, kRanks).take();
  return flat;
}

std::vector<const NativeStep*> native_calls(const Plan& plan) {
  std::vector<const NativeStep*> calls;
  for (const Step& step : plan.steps) {
    const MessageStep* const message = step.message();
    if (message != nullptr && (calls.empty() || message->native != calls.back()))
      calls.push_back(message->native);
  }
  return calls;
}

// A reduce-scatter to the rank's share of the result and an all-gather of the shares, one group
// each. Other ranks see the bits that one rank has added up.
TEST(NativePlan, AllReduceOfOptimizers) {
  constexpr uint64_t kShare = 368;  // of 1077 elements, a multiple of 16
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    for (const bool in_place : {false, true}) {
      const Flat flat = flat_plan(~0u, rank, in_place);
      const std::vector<const NativeStep*> calls = native_calls(*flat.plan);
      ASSERT_EQ(calls.size(), 2u);
      ASSERT_EQ(flat.plan->messages.groups.size(), 2u);
      EXPECT_EQ(calls[0]->call.kind, OpKind::kReduceScatter);
      EXPECT_EQ(calls[0]->call.reduce, ReduceOp::kMean);
      EXPECT_EQ(calls[1]->call.kind, OpKind::kAllGather);
      for (const NativeStep* call : calls) EXPECT_EQ(call->call.count, kShare);
      const auto resolved = [&](const Region& region) {
        const Region r = resolve(flat.plan->slots, region);
        return std::tuple(r.slot, r.offset, r.bytes);
      };
      const auto all = std::tuple(flat.out, uint64_t{0}, 4 * kShare * kRanks);
      const auto mine = std::tuple(flat.out, 4 * kShare * static_cast<uint64_t>(rank), 4 * kShare);
      EXPECT_EQ(resolved(calls[0]->in), all);
      EXPECT_EQ(resolved(calls[0]->out), mine);
      EXPECT_EQ(resolved(calls[1]->in), mine);
      EXPECT_EQ(resolved(calls[1]->out), all);
      const PeerTraffic& total = flat.plan->traffic.total;
      EXPECT_EQ(total.payload_bytes_sent, 2 * (kRanks - 1) * 4 * kShare);
      EXPECT_EQ(total.payload_bytes_received, total.payload_bytes_sent);
      EXPECT_EQ(std::ranges::count_if(flat.plan->steps,
                                      [](const Step& step) {
                                        return step.kernel() != nullptr &&
                                               step.kernel()->id == KernelId::kPack;
                                      }),
                in_place ? 0 : 1);
    }
  }
}

// What is not finite is flagged by the rank that has added it up; what is behind the tensors is no
// element.
TEST(NativePlan, AllReduceOfOptimizersFlagsItsOwnShare) {
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    const Flat flat = flat_plan(~0u, rank);
    const Step* check = nullptr;
    size_t at = 0;
    for (size_t i = 0; i < flat.plan->steps.size(); ++i) {
      const KernelStep* const kernel = flat.plan->steps[i].kernel();
      if (kernel == nullptr || kernel->id != KernelId::kReduce) continue;
      ASSERT_EQ(check, nullptr);
      check = &flat.plan->steps[i];
      at = i;
    }
    ASSERT_NE(check, nullptr);
    uint64_t elements = 0;
    for (const Piece& piece : check->kernel()->pieces) {
      EXPECT_GE(piece.flat, 368u * static_cast<uint64_t>(rank));
      elements += piece.count;
    }
    EXPECT_EQ(elements, rank == 2 ? 1077u - 2 * 368u : 368u);
    std::vector<Use> uses;
    collect_uses(flat.plan->slots, *check, &uses);
    EXPECT_TRUE(std::ranges::any_of(uses, [&](const Use& use) {
      return use.region.slot == flat.flags && use.access == Access::kReadWrite;
    }));
    const auto before = flat.plan->order.preds(static_cast<uint32_t>(at));
    EXPECT_TRUE(std::ranges::any_of(before, [&](uint32_t b) {
      const MessageStep* const message = flat.plan->steps[b].message();
      return message != nullptr && message->native->call.kind == OpKind::kAllGather;
    }));
  }
}

TEST(NativePlan, AllReduceOfOptimizersNeedsSumsOfFloats) {
  for (const NativeCollectives native : {NativeCollectives{0}, kNativeMoves | kNativeIntegers}) {
    const Flat flat = flat_plan(native, 0);
    EXPECT_GT(flat.plan->messages.transfers, 0u);
    for (const Step& step : flat.plan->steps) {
      const MessageStep* const message = step.message();
      EXPECT_TRUE(message == nullptr || message->native == nullptr);
    }
  }
}

}  // namespace
}  // namespace sotto::test
