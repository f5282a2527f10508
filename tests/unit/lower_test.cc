// What lowering makes of steps: their order, copies beside messages, cuts of long kernels and of
// what takes them back, events, and figures. commit_gate_test.cc has the decision.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/kernels/bytes.h"
#include "core/plan/collectives.h"
#include "tests/support/lowering.h"

namespace sotto::test {
namespace {

using Ids = std::vector<uint32_t>;

struct Lowering {
  DeviceCaps device;
  TransportCaps transport;
  Matching matching = Matching::kByKey;
  int32_t ranks = 3;

  Result<std::shared_ptr<const Plan>> tried(LogicalPlan plan) const {
    return lower_for(std::move(plan), device, transport, matching, ranks);
  }
  std::shared_ptr<const Plan> of(LogicalPlan plan) const {
    auto lowered = tried(std::move(plan));
    EXPECT_TRUE(lowered.ok()) << lowered.status().text();
    return lowered.ok() ? lowered.take() : std::make_shared<const Plan>();
  }
};

Lowering far_device() {
  Lowering far;
  far.device.synchronous = far.device.host_memory = false;
  far.device.lanes = 4;
  return far;
}

Ids preds(const Plan& plan, uint32_t step) {
  const auto all = plan.order.preds(step);
  return {all.begin(), all.end()};
}
Ids succs(const Plan& plan, uint32_t step) {
  const auto all = plan.order.succs(step);
  return {all.begin(), all.end()};
}

TEST(Lowering, OrderComesFromRegions) {
  PlanBuilder b;
  const uint32_t x = b.scratch(64), y = b.scratch(64);
  b.copy({y, 0, 16}, {x, 0, 16});   // 0
  b.copy({y, 16, 16}, {x, 0, 16});  // 1: another place
  b.copy({x, 0, 32}, {y, 0, 32});   // 2: reads both, writes what both read
  b.copy({x, 32, 16}, {x, 48, 16});
  const auto plan = Lowering().of(b.take());
  EXPECT_EQ(preds(*plan, 0), Ids{});
  EXPECT_EQ(preds(*plan, 1), Ids{});
  EXPECT_EQ(preds(*plan, 2), (Ids{0, 1}));
  EXPECT_EQ(preds(*plan, 3), Ids{});
  EXPECT_EQ(succs(*plan, 0), Ids{2});
  EXPECT_EQ(succs(*plan, 2), Ids{});
}

TEST(Lowering, AliasesAreTheSameMemory) {
  PlanBuilder b;
  const uint32_t x = b.bound(64), inside = b.bound(16), y = b.scratch(16);
  b.alias(inside, x, 32);
  b.copy({x, 32, 16}, {y, 0, 16});
  b.copy({y, 0, 16}, {inside, 0, 16});
  EXPECT_EQ(preds(*Lowering().of(b.take()), 1), Ids{0});
}

TEST(Lowering, OrderThatNoRegionShows) {
  PlanBuilder b;
  const uint32_t x = b.scratch(64);
  const uint32_t first = b.copy({x, 0, 8}, {x, 8, 8}), second = b.copy({x, 16, 8}, {x, 24, 8});
  b.order(second, first);
  EXPECT_EQ(preds(*Lowering().of(b.take()), second), Ids{first});
}

TEST(Lowering, AReplyTakesThePlaceOfWhatItWasMadeOf) {
  for (const bool elided : {false, true}) {
    PlanBuilder b;
    const uint32_t x = b.bound(64);
    b.send(1, {x, 0, 16}, 0);  // 0
    b.send(2, {x, 0, 16}, 0);  // 1
    b.recv(1, {x, 0, 16}, 1);  // 2
    if (elided) b.elide_anti_dependency(0);
    EXPECT_EQ(preds(*Lowering().of(b.take()), 2), elided ? Ids{1} : (Ids{0, 1}));
  }
}

TEST(Lowering, MessagesOfADeviceAreStaged) {
  PlanBuilder b;
  const uint32_t x = b.bound(64);
  b.recv(1, {x, 0, 16}, 0);
  b.send(2, {x, 0, 16}, 1);
  const auto plan = far_device().of(b.take());
  ASSERT_EQ(plan->steps.size(), 4u);
  EXPECT_TRUE(is_receive(plan->steps[0]));
  EXPECT_NE(plan->steps[1].copy(), nullptr);
  EXPECT_NE(plan->steps[2].copy(), nullptr);
  EXPECT_TRUE(is_send(plan->steps[3]));
  for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(preds(*plan, i), i == 0 ? Ids{} : Ids{i - 1}) << i;
  EXPECT_NE(plan->steps[1].lane, plan->steps[2].lane);  // directions do not wait for each other
  for (const uint32_t message : {0u, 3u})
    EXPECT_EQ(plan->slots[plan->steps[message].message()->data.slot].kind, SlotKind::kHost);
  EXPECT_GE(plan->arenas.host, 32u);
}

TEST(Lowering, EventsStandWhereSomethingOutsideTheLaneLooks) {
  PlanBuilder b;
  const uint32_t x = b.scratch(64);
  KernelOptions other;
  other.lane = 1;
  b.copy({x, 0, 8}, {x, 32, 8});          // 0: seen by 1, of its lane
  b.copy({x, 8, 8}, {x, 0, 8});           // 1: seen by 2, of another
  b.copy({x, 16, 8}, {x, 8, 8}, other);   // 2: seen by 3, of its lane
  b.copy({x, 24, 8}, {x, 16, 8}, other);  // 3: the last
  const auto plan = far_device().of(b.take());
  EXPECT_EQ(plan->order.needs_event, (std::vector<uint8_t>{0, 1, 0, 1}));
}

TEST(Lowering, LongKernelsAndTheirUndoAreCutAlike) {
  PlanBuilder b;
  const uint64_t bytes = 4 * 4 * kNormBlock;
  const uint32_t tensor = b.bound_list(std::span(&bytes, 1)), space = b.scratch(bytes);
  const auto pack = [&](uint64_t first, uint64_t blocks) {
    Piece piece;
    piece.flat = piece.offset = piece.target = first * kNormBlock;
    piece.block = first;
    piece.count = blocks * kNormBlock;
    return b.kernel<kernels::Pack>(
        {.tensors = list(tensor, Access::kRead, 32), .flat = flat(space, Access::kWrite, 32)},
        {piece}, {.flat_base = 0, .element_bytes = 4});
  };
  const uint32_t three = pack(0, 3), one = pack(3, 1);
  LogicalPlan logical = b.take();
  const auto undo = [&](uint32_t first, uint32_t last) {
    UndoStep step;
    step.step = logical.steps[three];
    step.pair_first = first;
    step.pair_last = last;
    step.only_if_paired_ran = true;
    logical.undo.push_back(step);
  };
  undo(three, three);      // parts, each with its own
  undo(three, one);        // whole, of all parts
  undo(kNoStep, kNoStep);  // of none
  Lowering cutting;
  cutting.device.split_elements = kNormBlock;
  const auto plan = cutting.of(std::move(logical));
  ASSERT_EQ(plan->steps.size(), 4u);
  for (const Step& step : plan->steps) {
    ASSERT_EQ(step.kernel()->pieces.size(), 1u);
    EXPECT_EQ(step.kernel()->pieces[0].count, kNormBlock);
  }
  ASSERT_EQ(plan->undo.size(), 5u);
  for (uint32_t part = 0; part < 3; ++part) {
    const UndoStep& step = plan->undo[part];
    EXPECT_EQ(step.pair_first, part);
    EXPECT_EQ(step.pair_last, part);
    EXPECT_TRUE(step.only_if_paired_ran);
    ASSERT_EQ(step.step.kernel()->pieces.size(), 1u);
    EXPECT_EQ(step.step.kernel()->pieces[0].offset, part * kNormBlock);
    EXPECT_EQ(step.step.kernel()->pieces[0].count, kNormBlock);
  }
  EXPECT_EQ(plan->undo[3].pair_first, 0u);
  EXPECT_EQ(plan->undo[3].pair_last, 3u);
  EXPECT_EQ(plan->undo[4].pair_first, kNoStep);
  EXPECT_EQ(plan->undo[4].pair_last, kNoStep);
  // Steps first, then undo steps, in order.
  EXPECT_EQ(plan->calls, 9u);
  for (uint32_t i = 0; i < 9; ++i)
    EXPECT_EQ((i < 4 ? plan->steps[i] : plan->undo[i - 4].step).kernel()->call, i);
}

TEST(Lowering, ReceivesOfARoundAreCounted) {
  PlanBuilder b;
  const uint32_t x = b.bound(256);
  b.recv(2, {x, 128, 64}, 3);
  b.recv(2, {x, 0, 16}, 1);
  b.recv(2, {x, 16, 48}, 1);
  b.send(1, {x, 192, 8}, 0);
  const auto plan = Lowering().of(b.take());
  ASSERT_EQ(plan->messages.receives.size(), 3u);
  EXPECT_TRUE(plan->messages.receives[0].empty());
  EXPECT_TRUE(plan->messages.receives[1].empty());
  ASSERT_EQ(plan->messages.receives[2].size(), 2u);
  EXPECT_EQ(plan->messages.receives[2][0].round, 1u);
  EXPECT_EQ(plan->messages.receives[2][0].count, 2u);
  EXPECT_EQ(plan->messages.receives[2][0].largest, 48u);
  EXPECT_EQ(plan->messages.receives[2][1].round, 3u);
  EXPECT_EQ(plan->traffic.peers[2].payload_bytes_received, 128u);
  EXPECT_EQ(plan->traffic.peers[1].payload_bytes_sent, 8u);
  EXPECT_EQ(plan->traffic.total.messages_received, 3u);
  EXPECT_EQ(plan->traffic.total.messages_sent, 1u);
}

// By place, whatever other bound slots there are.
TEST(Lowering, SlotsOfCollectivesStayKnown) {
  PlanBuilder b;
  CollectiveRequest request;
  request.kind = OpKind::kAllReduce;
  request.size = 3;
  request.dtypes = {Dtype::kF32};
  request.in_place = {0};
  for (const uint64_t count : {5u, 7u}) {
    b.bound(8);
    request.counts = {count};
    b.collective(emit_collective(b, request).take());
  }
  const auto plan = far_device().of(b.take());
  ASSERT_EQ(plan->collectives.size(), 2u);
  for (const uint32_t side : {plan->collectives[0].in, plan->collectives[0].out})
    EXPECT_EQ(plan->slots[side].bytes, 5 * sizeof(float));
  for (const uint32_t side : {plan->collectives[1].in, plan->collectives[1].out})
    EXPECT_EQ(plan->slots[side].bytes, 7 * sizeof(float));
}

TEST(Lowering, RefusesWhatLiesOutsideASlot) {
  PlanBuilder b;
  const uint32_t x = b.scratch(64);
  b.copy({x, 0, 16}, {x, 56, 16});
  const auto plan = Lowering().tried(b.take());
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.status().code(), Code::kInternal);
  EXPECT_EQ(plan.status().text(), "step 0 (copy) touches bytes 56..72 of slot 0, which has 64");
}

// ---- inputs that arrive ----

TEST(Lowering, WhatUsesAnInputComesAfterIt) {
  PlanBuilder b;
  const uint32_t early = b.bound(64), late = b.bound(64), other = b.bound(64), out = b.scratch(64);
  const uint32_t slots[] = {late, other};
  b.copy({out, 0, 16}, {early, 0, 16});   // 0
  EXPECT_EQ(b.await(slots), 0u);          // 1
  b.copy({out, 16, 16}, {late, 0, 16});   // 2
  b.copy({out, 32, 16}, {other, 8, 16});  // 3
  EXPECT_EQ(b.await({&early, 0}), 1u);    // 4: of nothing
  const auto plan = Lowering().of(b.take());
  EXPECT_EQ(plan->awaits, (Ids{1, 4}));
  EXPECT_EQ(preds(*plan, 0), Ids{});
  EXPECT_EQ(preds(*plan, 1), Ids{});
  EXPECT_EQ(preds(*plan, 2), Ids{1});
  EXPECT_EQ(preds(*plan, 3), Ids{1});
  EXPECT_EQ(preds(*plan, 4), Ids{});
}

// What binding an input looks at: its own slots and their aliases, however many slots there are.
TEST(Lowering, AnInputKnowsTheAliasesOfItsSlots) {
  for (const Lowering& lowering : {Lowering(), far_device()}) {
    PlanBuilder b;
    const uint32_t before = b.bound(16), early = b.bound(64), late = b.bound(64);
    const uint32_t inside = b.bound(32), other = b.bound(64), within = b.bound(16);
    const uint32_t deeper = b.bound(8), out = b.scratch(64), whole = b.bound(64);
    const uint32_t of_scratch = b.bound(16);
    b.alias(before, late, 48);
    b.alias(inside, early, 8);
    b.alias(within, other, 32);
    b.alias(deeper, within, 8);
    b.alias(whole, late, 0);
    b.alias(of_scratch, out, 16);
    const uint32_t first[] = {other, late};
    b.await(first);
    b.await({&early, 1});
    b.await({&early, 0});
    b.copy({out, 0, 8}, {deeper, 0, 8});
    const auto plan = lowering.of(b.take());
    ASSERT_EQ(plan->awaits.size(), 3u);
    std::vector<Ids> found;
    for (const uint32_t step : plan->awaits) found.push_back(plan->steps[step].await()->aliases);
    const std::vector<Ids> wanted{{before, within, deeper, whole}, {inside}, {}};
    EXPECT_EQ(found, wanted);
  }
}

TEST(Lowering, RefusesAnInputThatComesTooLate) {
  PlanBuilder used;
  const uint32_t in = used.bound(64), out = used.scratch(64);
  used.copy({out, 0, 16}, {in, 0, 16});
  used.await({&in, 1});
  const auto refused = Lowering().tried(used.take());
  EXPECT_EQ(refused.status().code(), Code::kInternal);
  EXPECT_EQ(refused.status().text(), "step 1 (await) writes what earlier steps use");

  PlanBuilder decided;
  const uint32_t late = decided.bound(64), word = decided.scratch(4), host = decided.host(4);
  decided.fill({word, 0, 4}, 1);
  decided.set_verdict(host, word);
  decided.await({&late, 1});
  EXPECT_EQ(Lowering().tried(decided.take()).status().text(),
            "step 2 (await) comes after the decision");
}

TEST(Lowering, TheDecisionWaitsForInputs) {
  PlanBuilder b;
  const uint32_t in = b.bound(64), word = b.scratch(4), host = b.host(4);
  b.await({&in, 1});
  b.fill({word, 0, 4}, 1);
  b.set_verdict(host, word);
  EXPECT_EQ(preds(*Lowering().of(b.take()), 1), Ids{0});
}

// By order: a group comes after the inputs that were named before it, also where a rank's messages
// do not need them.
TEST(Lowering, GroupsComeAfterTheInputsBeforeThem) {
  PlanBuilder b;
  const uint32_t a = b.bound(64), c = b.bound(64), in = b.scratch(64);
  b.send(1, {in, 0, 8}, 0);
  b.await({&a, 1});
  b.recv(1, {in, 8, 8}, 1);
  b.send(2, {a, 0, 8}, 2);
  b.await({&c, 1});
  b.send(2, {a, 0, 8}, 3);
  Lowering by_order;
  by_order.matching = Matching::kByOrder;
  const auto plan = by_order.of(b.take());
  ASSERT_EQ(plan->messages.groups.size(), 4u);
  Ids inputs;
  for (const IssueGroup& group : plan->messages.groups) inputs.push_back(group.inputs);
  EXPECT_EQ(inputs, (Ids{0, 1, 1, 2}));
}

// Messages of an operation that has time, in three slices of each of two rounds; the exchange in
// front of them goes at once.
LogicalPlan sliced_plan() {
  PlanBuilder b;
  const uint32_t out = b.scratch(64), in = b.scratch(64);
  b.send(1, {out, 56, 8}, 0);
  for (uint32_t k = 0; k < 6; ++k) b.send(1, {out, 8 * k, 8}, 1);
  for (uint32_t k = 0; k < 3; ++k) b.recv(1, {in, 8 * k, 8}, 1);
  for (uint32_t k = 0; k < 2; ++k) b.recv(2, {in, 24 + 8 * k, 8}, 1);
  b.copy({out, 0, 48}, {in, 0, 48});
  b.send(1, {out, 0, 8}, 2);
  LogicalPlan plan = b.take();
  plan.slicing = {.first_round = 1, .rounds = 2, .per_round = 3};
  return plan;
}

TEST(Lowering, MessagesAreDealtOutToSlices) {
  Lowering by_order;
  by_order.matching = Matching::kByOrder;
  const auto plan = by_order.of(sliced_plan());
  ASSERT_EQ(plan->awaits.size(), 5u);  // six slices, the first of which goes with the operation
  using Messages = std::vector<std::pair<int32_t, uint32_t>>;  // peer, segment
  std::vector<std::pair<uint32_t, Messages>> groups;
  for (const IssueGroup& group : plan->messages.groups) {
    Messages messages;
    for (const uint32_t step : group.steps)
      messages.emplace_back(plan->steps[step].message()->peer,
                            plan->steps[step].message()->segment);
    groups.emplace_back(group.inputs, messages);
  }
  // Both ends of a pair deal out the same messages, whatever others have.
  const std::vector<std::pair<uint32_t, Messages>> wanted{{0, {{1, 0}}},
                                                          {0, {{1, 0}, {1, 1}, {1, 0}, {2, 0}}},
                                                          {1, {{1, 2}, {1, 3}, {1, 1}}},
                                                          {2, {{1, 4}, {1, 5}, {1, 2}, {2, 1}}},
                                                          {4, {{1, 0}}}};
  EXPECT_EQ(groups, wanted);
  // With the awaits: what comes behind all of a round needs its last slice.
  EXPECT_EQ(plan->slice_steps, (Ids{5, 9, 15, 16, 18, 19}));
  EXPECT_EQ(plan->slice_steps.back(), plan->steps.size());
}

TEST(Lowering, SlicesAreOfLinksThatMatchByOrder) {
  const auto plan = Lowering().of(sliced_plan());
  EXPECT_TRUE(plan->awaits.empty());
  EXPECT_TRUE(plan->slice_steps.empty());
}

TEST(Lowering, APlanInSlicesHasNoOtherInputs) {
  PlanBuilder b;
  const uint32_t in = b.bound(64);
  b.await({&in, 1});
  b.send(1, {in, 0, 8}, 0);
  b.send(1, {in, 8, 8}, 0);
  LogicalPlan plan = b.take();
  plan.slicing = {.first_round = 0, .rounds = 1, .per_round = 2};
  Lowering by_order;
  by_order.matching = Matching::kByOrder;
  EXPECT_EQ(by_order.tried(std::move(plan)).status().code(), Code::kInternal);
}

// Where kernels find lists in device memory, the addresses of an input follow it, and kernels that
// take them as lists come after that.
TEST(Lowering, AddressesOfInputsFollowThem) {
  PlanBuilder b;
  const std::vector<uint64_t> bytes(4, 64);
  const uint32_t tensors = b.bound_list(bytes), flat_sum = b.scratch(256);
  const uint32_t late[] = {tensors + 2, tensors + 1};
  b.await(late);
  const auto pieces_of = [](uint32_t tensor) {
    return std::vector<Piece>{{.flat = 16 * tensor, .count = 16, .tensor = tensor}};
  };
  for (const uint32_t tensor : {0u, 2u}) {
    b.kernel<kernels::Pack>(
        {.tensors = list(tensors, Access::kRead, 32), .flat = flat(flat_sum, Access::kWrite, 32)},
        pieces_of(tensor), PackArgs{0, 4});
  }
  const auto plan = far_device().of(b.take());
  // The copy of all addresses, the input, the copy of its addresses, two kernels.
  ASSERT_EQ(plan->steps.size(), 5u);
  EXPECT_NE(plan->steps[1].await(), nullptr);
  EXPECT_EQ(plan->steps[2].copy()->source.slot, plan->addresses.late);
  EXPECT_EQ(plan->steps[2].copy()->source.offset, (tensors + 1) * sizeof(void*));
  EXPECT_EQ(plan->steps[2].copy()->source.bytes, 2 * sizeof(void*));
  EXPECT_EQ(preds(*plan, 2), (Ids{0, 1}));
  EXPECT_EQ(preds(*plan, 3), Ids{0});
  EXPECT_EQ(preds(*plan, 4), (Ids{0, 1, 2}));
}

}  // namespace
}  // namespace sotto::test
