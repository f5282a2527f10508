// The order inside a compressed all-reduce with several sections: what encodes one waits for
// nothing of another and for no message.
#include "core/codec/compressed.h"
#include "tests/support/lowering.h"

#include <gtest/gtest.h>

#include <functional>

namespace sotto::test {
namespace {

std::shared_ptr<const Plan> plan_of(const CompressedLayout& layout, const CodecSettings& coding,
                                    Matching matching) {
  PlanBuilder builder;
  emit_compressed_collective(builder, 1, layout, coding,
                             std::vector<uint8_t>(layout.tensors().size(), 0), 256 * 1024);
  DeviceCaps device;
  device.lanes = 2;
  TransportCaps transport;
  return lower_for(builder.take(), device, transport, matching,
                   static_cast<int32_t>(layout.servers()))
      .take();
}

// Everything that a step waits for, directly or not.
std::vector<uint8_t> ancestors(const Plan& plan, uint32_t step) {
  std::vector<uint8_t> seen(plan.steps.size());
  const std::function<void(uint32_t)> visit = [&](uint32_t s) {
    for (const uint32_t before : plan.order.preds(s)) {
      if (seen[before]) continue;
      seen[before] = 1;
      visit(before);
    }
  };
  visit(step);
  return seen;
}

TEST(CompressedPlan, EncodersWaitForNothingOfOtherSections) {
  const CompressedLayout layout({{40000, 0}, {3, 0}, {9000, 1}}, 3, 8, Granularity::kBucket, 9001);
  ASSERT_EQ(layout.sections().size(), 6u);
  for (const Matching matching : {Matching::kByKey, Matching::kByOrder}) {
    const auto plan = plan_of(layout, {}, matching);
    uint32_t encoders = 0;
    for (uint32_t i = 0; i < plan->steps.size(); ++i) {
      const KernelStep* const encode = plan->steps[i].kernel();
      if (encode == nullptr || encode->id != KernelId::kOnebitEncode) continue;
      ++encoders;
      const uint32_t section = encode->pieces.front().scale;
      const std::vector<uint8_t> before = ancestors(*plan, i);
      for (uint32_t b = 0; b < before.size(); ++b) {
        if (!before[b]) continue;
        const Step& other = plan->steps[b];
        ASSERT_EQ(other.message(), nullptr) << "an encoder waits for a message";
        if (other.kernel() == nullptr || other.kernel()->id == KernelId::kFill) continue;
        ASSERT_EQ(other.kernel()->id, KernelId::kOnebitEncode);
        ASSERT_EQ(other.kernel()->pieces.front().scale, section);
      }
    }
    EXPECT_GE(encoders, 18u);
  }
}

TEST(CompressedPlan, ServersOfASectionWaitForNoOtherSection) {
  const CompressedLayout layout({{40000, 0}}, 2, 8, Granularity::kBucket, 9001);
  const auto plan = plan_of(layout, {}, Matching::kByKey);
  uint32_t servers = 0;
  for (uint32_t i = 0; i < plan->steps.size(); ++i) {
    const KernelStep* const server = plan->steps[i].kernel();
    if (server == nullptr || server->id != KernelId::kOnebitServer) continue;
    ++servers;
    const std::vector<uint8_t> before = ancestors(*plan, i);
    for (uint32_t b = 0; b < before.size(); ++b) {
      const KernelStep* const kernel = plan->steps[b].kernel();
      if (!before[b] || kernel == nullptr || kernel->pieces.empty()) continue;
      ASSERT_EQ(kernel->pieces.front().scale, server->pieces.front().scale);
    }
  }
  EXPECT_EQ(servers, layout.sections().size());
}

TEST(CompressedPlan, ServersOfBlocksWaitForTheirRowsOnly) {
  const CompressedLayout layout({{200000, 0}}, 2, 512, Granularity::kFlat, 0, false);
  PlanBuilder builder;
  CodecSettings coding;
  coding.kind = CodecKind::kInt8;
  coding.block = 256;
  emit_compressed_collective(builder, 0, layout, coding, std::vector<uint8_t>{0}, 16384);
  DeviceCaps device;
  TransportCaps transport;
  const auto plan = lower_for(builder.take(), device, transport, Matching::kByKey, 2).take();
  uint32_t servers = 0;
  for (uint32_t i = 0; i < plan->steps.size(); ++i) {
    const KernelStep* const server = plan->steps[i].kernel();
    if (server == nullptr || server->id != KernelId::kQuantServer) continue;
    ++servers;
    uint32_t receives = 0;
    for (const uint32_t b : plan->order.preds(i)) receives += is_receive(plan->steps[b]);
    EXPECT_EQ(receives, 1u);
  }
  EXPECT_GT(servers, 3u);
}

// Transports that match by order issue rounds in ascending order: the first exchange of a section
// must not stand behind the second one of the section before it.
TEST(CompressedPlan, RoundsInterleaveSections) {
  for (const uint64_t elements : {5000u, 18000u, 40000u}) {
    const CompressedLayout layout({{elements, 0}}, 2, 8, Granularity::kBucket, 9001);
    const auto plan = plan_of(layout, {}, Matching::kByOrder);
    const auto n = static_cast<uint32_t>(layout.sections().size());
    for (const auto& group : plan->messages.groups) EXPECT_FALSE(group.steps.empty());
    EXPECT_EQ(plan->messages.groups.size(), 2 * n);
    // Section i's payload of the first exchange leaves in a group before its own second one and
    // before the second one of section i - 1.
    const auto group_of = [&](KernelId producer, uint32_t section) {
      for (uint32_t i = 0; i < plan->steps.size(); ++i) {
        const Step& step = plan->steps[i];
        if (!is_send(step)) continue;
        for (const uint32_t b : plan->order.preds(i)) {
          const KernelStep* const before = plan->steps[b].kernel();
          if (before != nullptr && before->id == producer && !before->pieces.empty() &&
              before->pieces.front().scale == section)
            return step.message()->issue_round;
        }
      }
      return ~0u;
    };
    for (uint32_t s = 0; s < n; ++s) {
      const uint32_t first = group_of(KernelId::kOnebitEncode, s);
      const uint32_t second = group_of(KernelId::kOnebitServer, s);
      ASSERT_NE(first, ~0u);
      ASSERT_NE(second, ~0u);
      EXPECT_LT(first, second);
      if (s > 0) {
        EXPECT_LT(first, group_of(KernelId::kOnebitServer, s - 1));
      }
    }
  }
}

// Bits of small tensors share bytes. What a kernel touches is one region nevertheless: as many as
// tensors would be looked through for every later step that reads the bits.
TEST(CompressedPlan, BytesThatTensorsShareAreTouchedOnce) {
  const std::vector<Slot> slots(1, Slot{SlotKind::kScratch, 1000, kNoSlot, 0, 0});
  KernelStep kernel;
  kernel.operands = {flat(0, Access::kWrite, 1)};
  for (uint32_t t = 0; t < 1000; ++t) {
    Piece piece;
    piece.flat = t * uint64_t{3};
    piece.count = 3;
    piece.tensor = t;
    kernel.pieces.push_back(piece);
  }
  Step step;
  step.work = std::move(kernel);
  std::vector<Use> uses;
  collect_uses(slots, step, &uses);
  ASSERT_EQ(uses.size(), 1u);
  EXPECT_EQ(uses[0].region.offset, 0u);
  EXPECT_EQ(uses[0].region.bytes, 375u);
}

}  // namespace
}  // namespace sotto::test
