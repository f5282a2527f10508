// The memory of a step as its kernels see it: which numbers of the parameter groups a plan has, who
// writes them, and that nothing is copied that no kernel reads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "core/kernels/lion.h"
#include "core/optim/algorithms/adam.h"
#include "core/optim/algorithms/first_moment.h"
#include "core/optim/algorithms/lamb.h"
#include "core/optim/algorithms/onebit_adam.h"
#include "core/optim/algorithms/onebit_lamb.h"
#include "core/optim/algorithms/sgd.h"
#include "core/optim/algorithms/zeroone_step.h"

namespace sotto::test {
namespace {

const std::vector<LayoutTensor> kTensors{{1000, 0}, {24, 1}};

struct World {
  CompressedLayout layout{kTensors, 2, 8, Granularity::kGroup};
  StepShape shape;

  World() {
    shape.size = 2;
    shape.layout = &layout;
    shape.groups = 2;
  }
};

// Types of the arrays of a plan; each has one copy, from the host to where kernels read it.
std::vector<const ScalarsType*> types_of(const StepPlan& step) {
  std::vector<const ScalarsType*> out;
  for (const ScalarsArray& array : step.slots.scalars) {
    out.push_back(array.type);
    const uint64_t bytes = 2 * array.type->bytes;
    EXPECT_EQ(step.plan.slots[array.host].bytes, bytes);
    EXPECT_EQ(step.plan.slots[array.host].kind, SlotKind::kHost);
    EXPECT_EQ(std::ranges::count_if(step.plan.steps,
                                    [&](const Step& s) {
                                      const CopyStep* const copy = s.copy();
                                      return copy != nullptr && copy->source.slot == array.host &&
                                             copy->destination.slot == array.device &&
                                             copy->source.bytes == bytes;
                                    }),
              1);
  }
  return out;
}

using Types = std::vector<const ScalarsType*>;

TEST(StepOperands, APlanHasTheNumbersThatItsKernelsRead) {
  const World world;
  const StepShape& shape = world.shape;
  EXPECT_EQ(types_of(build_adam_step(shape)), Types({&kScalarsType<AdamGroupScalars>}));
  EXPECT_EQ(types_of(build_lamb_step(shape, true)), Types({&kScalarsType<LambGroupScalars>}));
  EXPECT_EQ(types_of(build_sgd_step(shape, true, false)), Types({&kScalarsType<SgdGroupScalars>}));
  const auto lion = [](StepFrame& frame, const GradientStage& gradient) {
    emit_first_moment<LionElement>(frame, gradient, true, SourceArgs{gradient.type}, {});
  };
  EXPECT_EQ(types_of(build_dense_step(shape, lion, false)),
            Types({&kScalarsType<LionGroupScalars>}));
  CompressedStepRequest compressed;
  compressed.shape = shape;
  compressed.momentum_bits = true;
  EXPECT_EQ(types_of(build_onebit_adam_step(compressed)), Types({&kScalarsType<GroupScalars>}));
  EXPECT_EQ(types_of(build_onebit_lamb_step(compressed, 0)),
            Types({&kScalarsType<GroupScalars>, &kScalarsType<OnebitLambGroupScalars>}));
  ZeroOneRequest sync;
  sync.shape = shape;
  sync.kind = ZeroOneUpdate::kSync;
  EXPECT_EQ(types_of(build_zeroone_step(sync)), Types({&kScalarsType<ZeroOneGroupScalars>}));
}

TEST(StepOperands, NumbersOfTheStepAreCopiedOnlyIfAKernelReadsThem) {
  World world;
  EXPECT_EQ(build_adam_step(world.shape).slots.step_scalars, kNoSlot);
  for (const auto change :
       {+[](StepShape* s) { s->accumulated = true; }, +[](StepShape* s) { s->loss_scaled = true; },
        +[](StepShape* s) { s->state = StateType::kBf16; }}) {
    StepShape shape = world.shape;
    change(&shape);
    const StepPlan step = build_adam_step(shape);
    ASSERT_NE(step.slots.step_scalars, kNoSlot);
    EXPECT_EQ(step.plan.slots[step.slots.step_scalars].bytes, sizeof(StepScalars));
  }
}

TEST(StepOperands, NumbersOfAGroupAreOfOneType) {
  alignas(AdamGroupScalars) std::byte memory[sizeof(AdamGroupScalars)];
  std::memset(memory, 0xff, sizeof memory);
  const ScalarsRef scalars(kScalarsType<AdamGroupScalars>, memory);
  ASSERT_NE(scalars.as<AdamGroupScalars>(), nullptr);
  EXPECT_EQ(scalars.as<AdamGroupScalars>()->c1, 1.0f);  // defaults, whatever was there
  EXPECT_EQ(scalars->lr, 0.0);
  EXPECT_EQ(scalars.as<LambGroupScalars>(), nullptr);
  EXPECT_EQ(scalars.as<GroupScalars>(), nullptr);
  scalars->lr = 0.5;
  EXPECT_EQ(scalars.as<AdamGroupScalars>()->lr, 0.5);
}

TEST(StepOperands, AdamWritesItsNumbersIntoItsTypeAlone) {
  OptimizerParams params;
  params.adam.w_mode = false;
  AdamGroupScalars adam;
  const ScalarsRef own(kScalarsType<AdamGroupScalars>, &adam);
  write_adam_scalars(params, 2, own);
  EXPECT_EQ(adam.c1, static_cast<float>(1 - 0.9 * 0.9));
  EXPECT_EQ(adam.decoupled, 0u);
  GroupScalars shared;
  write_adam_scalars(params, 2, ScalarsRef(kScalarsType<GroupScalars>, &shared));
  EXPECT_EQ(shared.b1, 0.0f);
}

}  // namespace
}  // namespace sotto::test
