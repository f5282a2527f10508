// The plans of updates and holds: what they overwrite comes after a step that commits, so a comm
// that fails before leaves the average under way as it was sent, and everything that it moves.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/outer/plans.h"
#include "tests/support/lowering.h"
#include "tests/unit/config_outer.h"

namespace sotto::test {
namespace {

constexpr const char* kSettings[] = {
    R"({"preset": "co2"})",
    R"({"preset": "co2", "codec": "onebit"})",
    R"({"preset": "co2_paper"})",
    R"({"preset": "delta_corrected"})",
    R"({"preset": "delayed_diloco"})",
    R"({"preset": "delayed_diloco", "merge": "lerp", "merge_a": 0.5})",
    R"({"preset": "delayed_diloco", "merge": "add_progress"})",
    R"({"preset": "eager_diloco"})",
    R"({"preset": "eager_diloco", "codec": "onebit"})",
    R"({"preset": "eager_diloco", "codec": "topk"})",
    R"({"preset": "co2", "codec": {"type": "topk", "exchange": "two_phase"}})",
    R"({"preset": "slowmo", "delay": 48})",
    R"({"preset": "overlap_local_sgd"})",
    R"({"preset": "cocod"})",
    R"({"preset": "diloco"})",
    R"({"preset": "streaming_diloco", "period": 4, "delay": 1, "fragments": 2})",
};

std::vector<DeviceCaps> devices() {
  DeviceCaps cpu, gpu;
  cpu.split_elements = kNormBlock;
  gpu.synchronous = gpu.host_memory = false;
  gpu.lanes = 4;
  return {cpu, gpu};
}

uint32_t slot_of(const OuterPlan& made, OuterArray which) {
  return made.arrays[static_cast<size_t>(which)];
}

// Numbers of bound slots that are written: before a step that commits, and at all.
struct Written {
  std::vector<uint32_t> early, any;
  bool has(uint32_t slot) const { return std::ranges::count(any, slot) != 0; }
};

Written written(const Plan& plan) {
  Written out;
  std::vector<uint8_t> behind(plan.steps.size());
  for (uint32_t i = 0; i < plan.steps.size(); ++i) {
    behind[i] = plan.steps[i].phase == Phase::kCommitting;
    for (const uint32_t before : plan.order.preds(i)) behind[i] |= behind[before];
    std::vector<Use> uses;
    collect_uses(plan.slots, plan.steps[i], &uses);
    for (const Use& use : uses) {
      if (use.access == Access::kRead || plan.slots[use.region.slot].kind != SlotKind::kBound)
        continue;
      out.any.push_back(use.region.slot);
      if (behind[i] == 0) out.early.push_back(use.region.slot);
    }
  }
  return out;
}

class OuterPlans : public testing::TestWithParam<const char*> {
 protected:
  // check(shape, compressed, lower): of every shape of the settings.
  template <class Check>
  static void of_shapes(Check&& check) {
    for (const int32_t size : {1, 2}) {
      const OuterConfig config = parse(GetParam()).resolved(static_cast<uint64_t>(size));
      const CompressedLayout layout =
          outer_layout(config, {{700, 0}, {1, 0}, {5000, 0}}, static_cast<uint32_t>(size));
      for (const bool last : {false, true}) {
        OuterShape shape;
        shape.size = size;
        shape.layout = &layout;
        shape.config = &config;
        shape.last = last;
        shape.copies = {.type = Dtype::kBF16, .tensors = {0, 2}};
        for (const DeviceCaps& device : devices()) {
          SCOPED_TRACE(fmt::format("{} ranks, {}, {}", size, last ? "the last one" : "not the last",
                                   device.synchronous ? "cpu" : "gpu"));
          check(shape, [&](OuterPlan* made) {
            const auto plan = lower_for(std::move(made->plan), device, {}, Matching::kByKey, size);
            EXPECT_TRUE(plan.ok()) << plan.status().text();
            return plan.ok() ? written(**plan) : Written();
          });
        }
      }
    }
  }
};

TEST_P(OuterPlans, AnUpdateOverwritesNothingUnlessItCommits) {
  of_shapes([](const OuterShape& shape, const auto& writes) {
    for (const auto& [compressed, next] : {std::pair(false, false), {false, true}, {true, true}}) {
      if (next && !shape.codes()) continue;
      OuterPlan made = build_outer_update(shape, compressed, next);
      const Written found = writes(&made);
      EXPECT_EQ(found.has(slot_of(made, OuterArray::kSent)), shape.keeps_sent());
      EXPECT_TRUE(found.early.empty()) << "slot " << found.early.front();
      EXPECT_TRUE(found.has(slot_of(made, OuterArray::kAnchor)));
      EXPECT_EQ(found.has(slot_of(made, OuterArray::kMessage)), shape.launches());
      EXPECT_EQ(made.told != kNoSlot, shape.launches());
    }
  });
}

// What a hold sends has the memory of no average.
TEST_P(OuterPlans, AHoldMovesNothingUnlessItCommits) {
  if (!parse(GetParam()).schedule.follows()) return;
  of_shapes([](const OuterShape& shape, const auto& writes) {
    for (const bool next : {false, true}) {
      if (next && !shape.codes()) continue;
      OuterPlan made = build_outer_hold(shape, next);
      const Written found = writes(&made);
      for (const uint32_t slot : found.early) {
        EXPECT_TRUE(slot == slot_of(made, OuterArray::kMessage) ||
                    slot == slot_of(made, OuterArray::kPayload) ||
                    slot == slot_of(made, OuterArray::kSent))
            << "slot " << slot;
      }
      EXPECT_TRUE(found.has(made.params));
      EXPECT_EQ(found.has(slot_of(made, OuterArray::kMessage)), shape.launches());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Settings, OuterPlans, testing::ValuesIn(kSettings));

}  // namespace
}  // namespace sotto::test
