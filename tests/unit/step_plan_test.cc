// Plans of steps: which tensors the kernels of an update of several passes take at once, where one
// pass leaves what the next reads, and how the outcome comes to the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/optim/algorithms/adam.h"
#include "core/optim/algorithms/lamb.h"
#include "core/optim/algorithms/onebit_adam.h"
#include "core/optim/algorithms/onebit_lamb.h"
#include "core/optim/algorithms/zeroone_step.h"

namespace sotto::test {
namespace {

using Numbers = std::vector<uint32_t>;

// Groups in turn, one tensor without elements, one frozen, one of several norm blocks.
const std::vector<LayoutTensor> kTensors{
    {100, 0}, {kNormBlock + 5, 1}, {0, 0}, {200, 0}, {300, 1}, {50, 0}, {70, 1}};

struct World {
  CompressedLayout layout;
  StepShape shape;

  explicit World(int32_t size)
      : layout(kTensors, static_cast<uint32_t>(size), 8, Granularity::kGroup) {
    shape.size = size;
    shape.layout = &layout;
    shape.groups = 2;
    shape.frozen = {0, 0, 0, 0, 0, 0, 1};
  }
};

std::vector<Numbers> tensors_of(const std::vector<TensorBatch>& batches) {
  std::vector<Numbers> out;
  for (const TensorBatch& batch : batches) {
    Numbers& tensors = out.emplace_back();
    for (const NormRange& range : batch.ranges) tensors.push_back(range.tensor);
  }
  return out;
}

TEST(TensorBatches, AreOfOneGroupAndAsLargeAsIsAskedFor) {
  World world(1);
  EXPECT_EQ(tensors_of(StepFrame(world.shape).batches()),
            (std::vector<Numbers>{{0, 3, 5}, {1, 4}}));
  world.shape.batch_elements = 350;
  EXPECT_EQ(tensors_of(StepFrame(world.shape).batches()),
            (std::vector<Numbers>{{0, 3, 5}, {1}, {4}}));
  world.shape.batch_elements = 300;
  EXPECT_EQ(tensors_of(StepFrame(world.shape).batches()),
            (std::vector<Numbers>{{0, 3}, {5}, {1}, {4}}));
  world.shape.batch_elements = 1;
  EXPECT_EQ(tensors_of(StepFrame(world.shape).batches()),
            (std::vector<Numbers>{{0}, {3}, {5}, {1}, {4}}));
  world.shape.frozen.assign(kTensors.size(), 1);
  EXPECT_TRUE(StepFrame(world.shape).batches().empty());
}

TEST(TensorBatches, AreATensorWhereLaunchesCostNothing) {
  DeviceCaps device;
  device.split_elements = 4 * kNormBlock;
  EXPECT_EQ(batch_elements_of(device), 1u);
  device.synchronous = false;
  EXPECT_EQ(batch_elements_of(device), 4 * kNormBlock);
  device.split_elements = 0;
  EXPECT_EQ(batch_elements_of(device), 0u);
}

TEST(TensorBatches, HaveTheElementsAndBlocksOfTheirTensors) {
  const World world(3);
  const std::vector<NormRange> ranges = world.layout.tensor_ranges();
  for (const TensorBatch& batch : StepFrame(world.shape).batches()) {
    uint64_t end = 0;
    std::map<uint32_t, uint64_t> elements;
    for (const Piece& piece : batch.pieces) elements[piece.tensor] += piece.count;
    for (const NormRange& range : batch.ranges) {
      const NormRange& all = ranges[range.tensor];
      EXPECT_EQ(batch.first_block + range.first_block, all.first_block);
      EXPECT_EQ(range.blocks, all.blocks);
      EXPECT_EQ(range.group, all.group);
      EXPECT_EQ(elements[range.tensor], all.count);
      end = range.first_block + range.blocks;
    }
    EXPECT_EQ(elements.size(), batch.ranges.size());
    EXPECT_EQ(batch.blocks, end);
    EXPECT_TRUE(std::ranges::is_sorted(batch.pieces, {}, &Piece::block));
  }
}

// How many calls of each kernel a plan has.
std::map<KernelId, int> calls_of(const LogicalPlan& plan) {
  std::map<KernelId, int> out;
  for (const Step& step : plan.steps) {
    if (step.kernel() != nullptr) ++out[step.kernel()->id];
  }
  return out;
}

StepPlan onebit_lamb_step(const StepShape& shape) {
  CompressedStepRequest request;
  request.shape = shape;
  request.momentum_bits = shape.size > 1;
  return build_onebit_lamb_step(request, 0);
}

TEST(LambPlan, HasThreeCallsForABatch) {
  for (const int32_t size : {1, 2}) {
    World world(size);
    for (const auto& [limit, batches] : {std::pair(0, 2), std::pair(300, 4), std::pair(1, 5)}) {
      world.shape.batch_elements = static_cast<uint64_t>(limit);
      for (const bool average : {false, true}) {
        auto calls = calls_of(build_lamb_step(world.shape, average).plan);
        EXPECT_EQ(calls[KernelId::kLambMoments], batches);
        EXPECT_EQ(calls[KernelId::kLambScalars], batches);
        EXPECT_EQ(calls[KernelId::kLambUpdate], batches);
      }
      auto calls = calls_of(onebit_lamb_step(world.shape).plan);
      EXPECT_EQ(calls[KernelId::kOnebitLambFactor], batches);
      EXPECT_EQ(calls[KernelId::kOnebitLambScalars], batches);
      EXPECT_EQ(calls[KernelId::kMomentumUpdate], batches);
    }
  }
}

const KernelStep& first_call(const LogicalPlan& plan, KernelId id) {
  const auto is = [id](const Step& s) { return s.kernel() != nullptr && s.kernel()->id == id; };
  return *std::ranges::find_if(plan.steps, is)->kernel();
}

// Where the tensor's directions lie.
Region directions_of(const LogicalPlan& plan, uint32_t tensor) {
  const uint32_t first = first_call(plan, KernelId::kLambUpdate).operands[0].slot;
  return resolve(plan.slots, {first + tensor, 0, kTensors[tensor].count * 4});
}

// The caller's gradients are not overwritten: batches have one buffer, in which their tensors lie
// one after the other.
TEST(LambPlan, DirectionsOfABatchLieInOneBuffer) {
  World world(1);
  for (const auto& [limit, bytes] : {std::pair(0, 34176), std::pair(1, 32896)}) {
    world.shape.batch_elements = static_cast<uint64_t>(limit);
    const StepPlan step = build_lamb_step(world.shape, false);
    std::set<uint32_t> buffers;
    for (const TensorBatch& batch : StepFrame(world.shape).batches()) {
      uint64_t end = 0;
      for (const NormRange& range : batch.ranges) {
        const Region at = directions_of(step.plan, range.tensor);
        buffers.insert(at.slot);
        EXPECT_GE(at.offset, end);
        EXPECT_EQ(at.offset % 128, 0u);
        end = at.offset + at.bytes;
        EXPECT_LE(end, step.plan.slots[at.slot].bytes);
      }
    }
    ASSERT_EQ(buffers.size(), 1u);
    EXPECT_EQ(step.plan.slots[*buffers.begin()].kind, SlotKind::kScratch);
    EXPECT_EQ(step.plan.slots[*buffers.begin()].bytes, static_cast<uint64_t>(bytes));
  }
}

TEST(LambPlan, DirectionsTakeThePlaceOfAverages) {
  const World world(2);
  const StepPlan step = build_lamb_step(world.shape, false);
  const OperandRef& g = first_call(step.plan, KernelId::kLambMoments).operands[0];
  EXPECT_EQ(first_call(step.plan, KernelId::kLambUpdate).operands[0].slot, g.slot);
}

// ---- The outcome ----

// Everything that the host reads at the end comes with one copy, and what it reads there has its
// place in it.
void expect_one_copy(const StepPlan& step) {
  const LogicalPlan& plan = step.plan;
  const uint32_t host = plan.decision.verdict;
  std::vector<CopyStep> copies;
  for (const Step& s : plan.steps) {
    if (s.copy() == nullptr) continue;
    const Region to = s.copy()->destination;
    EXPECT_EQ(plan.slots[to.slot].kind == SlotKind::kHost, to.slot == host);
    if (to.slot == host) copies.push_back(*s.copy());
  }
  ASSERT_EQ(copies.size(), 1u);
  const uint64_t bytes = plan.slots[host].bytes;
  EXPECT_EQ(copies[0].destination.offset, 0u);
  EXPECT_EQ(copies[0].destination.bytes, bytes);
  const Region word = resolve(plan.slots, {plan.decision.word, 0, 4});
  EXPECT_EQ(word.slot, copies[0].source.slot);
  EXPECT_EQ(word.offset, copies[0].source.offset);
  const StepVerdict& v = step.verdict;
  uint64_t end = 4;
  const auto behind = [&](uint64_t at, uint64_t size) {
    EXPECT_GE(at, end);
    EXPECT_EQ(at % 8, 0u);
    end = at + size;
    EXPECT_LE(end, bytes);
  };
  if (v.norm != 0) behind(v.norm, 8);
  if (v.norm_message_count != 0) behind(v.norm_messages, v.norm_message_count * kNormMessageBytes);
  if (v.worker_message_count != 0) behind(v.worker_messages, v.worker_message_count * 4);
  if (v.tensor_step_count != 0) behind(v.tensor_steps, v.tensor_step_count * sizeof(TensorStep));
}

TEST(StepOutcome, IsOneCopy) {
  for (const int32_t size : {1, 2}) {
    for (const double clip : {0.0, 1.0}) {
      World world(size);
      world.shape.clip = clip;
      const StepPlan adam = build_adam_step(world.shape);
      expect_one_copy(adam);
      EXPECT_EQ(adam.verdict.norm != 0, clip > 0 || size == 1);
      // Flags of averages do not tell whose gradients they are.
      EXPECT_EQ(adam.verdict.norm_message_count, clip > 0 || size == 1 ? 1u : 0u);
      EXPECT_EQ(adam.verdict.tensor_step_count, 0u);
      const StepPlan lamb = build_lamb_step(world.shape, false);
      expect_one_copy(lamb);
      EXPECT_EQ(lamb.verdict.tensor_step_count, kTensors.size());
      const StepPlan onebit_lamb = onebit_lamb_step(world.shape);
      expect_one_copy(onebit_lamb);
      EXPECT_EQ(onebit_lamb.verdict.worker_message_count, size == 1 ? 0u : 2u);
      CompressedStepRequest request;
      request.shape = world.shape;
      expect_one_copy(build_onebit_adam_step(request));
      ZeroOneRequest sync;
      sync.shape = world.shape;
      sync.kind = ZeroOneUpdate::kSync;
      expect_one_copy(build_zeroone_step(sync));
    }
  }
}

TEST(StepOutcome, HasTheMessagesOfACodec) {
  World world(2);
  world.shape.average.codec = CodecSettings{};
  const StepPlan step = build_adam_step(world.shape);
  expect_one_copy(step);
  EXPECT_EQ(step.verdict.worker_message_count, 2u);
}

}  // namespace
}  // namespace sotto::test
