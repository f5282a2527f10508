// What a training step of BERT-Large sends over NCCL: in how many groups, how many messages, and
// with how much memory. Plans alone: nothing runs.
#include <gtest/gtest.h>

#include "core/optim/algorithms/adam.h"
#include "core/optim/algorithms/lamb.h"
#include "core/optim/algorithms/onebit_adam.h"
#include "core/optim/algorithms/onebit_lamb.h"
#include "tests/support/lowering.h"
#include "transports/nccl/caps.h"

namespace sotto::test {
namespace {

constexpr uint64_t kHidden = 1024, kVocabulary = 30'522;

// The parameters of BERT-Large for pre-training, in their order.
std::vector<LayoutTensor> bert_large() {
  std::vector<LayoutTensor> tensors;
  const auto add = [&](std::initializer_list<uint64_t> counts) {
    for (const uint64_t count : counts) tensors.push_back({count, 0});
  };
  const auto dense = [&](uint64_t in, uint64_t out) { add({in * out, out}); };
  const auto norm = [&] { add({kHidden, kHidden}); };
  add({kVocabulary * kHidden, 512 * kHidden, 2 * kHidden});
  norm();
  for (int layer = 0; layer < 24; ++layer) {
    for (int attention = 0; attention < 4; ++attention) dense(kHidden, kHidden);
    norm();
    dense(kHidden, 4 * kHidden);
    dense(4 * kHidden, kHidden);
    norm();
  }
  dense(kHidden, kHidden);  // pooler
  add({kVocabulary});
  dense(kHidden, kHidden);
  norm();
  dense(kHidden, 2);
  return tensors;
}

struct World {
  // align: of a codec; 0: there is none.
  World(int32_t size, uint64_t align, const TransportCaps& caps_in)
      : caps(caps_in),
        layout(bert_large(), align == 0 ? 1 : static_cast<uint32_t>(size), align == 0 ? 8 : align,
               Granularity::kFlat) {
    shape.rank = 1;
    shape.size = size;
    shape.layout = &layout;
    const TransportCaps* const transports[] = {&caps};
    shape.sizes = common_sizes(transports);
    shape.average.native = caps.native;
  }
  std::shared_ptr<const Plan> plan(StepPlan step) const {
    DeviceCaps device;
    device.synchronous = device.host_memory = false;
    device.lanes = 4;
    return lower_for(std::move(step.plan), device, caps, Matching::kByOrder, shape.size).take();
  }

  TransportCaps caps;
  CompressedLayout layout;
  StepShape shape;
};

uint64_t bytes_of(const CompressedLayout& layout) { return layout.elements() * 4; }

// Messages of this rank.
struct Sent {
  size_t groups;
  uint64_t messages;
  bool operator==(const Sent&) const = default;
};
Sent sent_by(const Plan& plan) {
  return {plan.messages.groups.size(), plan.traffic.total.messages_sent};
}
void PrintTo(const Sent& sent, std::ostream* out) {
  *out << sent.messages << " messages in " << sent.groups << " groups";
}

TEST(StepRounds, TheModelIsBertLarge) {
  const World world(2, 0, nccl::caps_of(0));
  EXPECT_EQ(world.layout.tensors().size(), 398u);
  EXPECT_EQ(world.layout.elements(), 336'226'108u);
}

// Payload and scales to each other rank, twice.
TEST(StepRounds, CompressedSteps) {
  for (const int32_t size : {2, 8}) {
    const auto others = static_cast<uint64_t>(size - 1);
    const World world(size, CodecSettings{}.chunk_align, nccl::caps_of(0));
    for (const bool clipped : {false, true}) {
      CompressedStepRequest request;
      request.shape = world.shape;
      request.shape.clip = clipped ? 1 : 0;
      request.momentum_bits = true;
      // The norms of a clipped step are one more round.
      const Sent expected = clipped ? Sent{3, 5 * others} : Sent{2, 4 * others};
      EXPECT_EQ(sent_by(*world.plan(build_onebit_adam_step(request))), expected) << size;
      EXPECT_EQ(sent_by(*world.plan(build_onebit_lamb_step(request, 0))), expected) << size;
    }
  }
}

// One encoder for each rank, and one server.
TEST(StepRounds, CompressedStepsAreNotCut) {
  const World world(8, CodecSettings{}.chunk_align, nccl::caps_of(0));
  CompressedStepRequest request;
  request.shape = world.shape;
  const auto plan = world.plan(build_onebit_adam_step(request));
  const auto calls = [&](KernelId id) {
    return std::ranges::count_if(plan->steps, [id](const Step& step) {
      return step.kernel() != nullptr && step.kernel()->id == id;
    });
  };
  EXPECT_EQ(calls(KernelId::kOnebitLambEncode), 8);
  EXPECT_EQ(calls(KernelId::kOnebitServer), 1);
}

// Two windows: rows, rows with results, results; then flags, unless a norm is taken anyway.
TEST(StepRounds, AveragesInFullPrecision) {
  for (const int32_t size : {2, 8}) {
    const auto others = static_cast<uint64_t>(size - 1);
    const World world(size, 0, nccl::caps_of(kNativeMoves | kNativeIntegers));
    for (const bool clipped : {false, true}) {
      StepShape shape = world.shape;
      shape.clip = clipped ? 1 : 0;
      const Sent expected = clipped ? Sent{3, 4 * others} : Sent{4, 5 * others};
      for (const auto& plan :
           {world.plan(build_adam_step(shape)), world.plan(build_lamb_step(shape, true))}) {
        EXPECT_EQ(sent_by(*plan), expected) << size;
        // The averages and the rows. Packed tensors have no memory of their own.
        const uint64_t most = bytes_of(world.layout) + world.caps.held.bytes + (4 << 20);
        EXPECT_LE(plan->arenas.scratch, most) << size;
      }
    }
  }
}

// Gradients of another type are converted where the averages will be.
TEST(StepRounds, AveragesOfOtherTypes) {
  const World world(2, 0, nccl::caps_of(0));
  StepShape shape = world.shape;
  shape.gradients = Dtype::kBF16;
  const auto plan = world.plan(build_adam_step(shape));
  EXPECT_EQ(sent_by(*plan), (Sent{4, 5}));
  EXPECT_LE(plan->arenas.scratch, bytes_of(world.layout) + world.caps.held.bytes + (4 << 20));
}

// A reduce-scatter and an all-gather; the averages are the only memory.
TEST(StepRounds, NativeAverages) {
  for (const int32_t size : {2, 8}) {
    const auto others = static_cast<uint64_t>(size - 1);
    const World world(size, 0, nccl::caps_of(kNativeMoves | kNativeIntegers | kNativeFloats));
    for (const bool clipped : {false, true}) {
      StepShape shape = world.shape;
      shape.clip = clipped ? 1 : 0;
      const auto plan = world.plan(build_adam_step(shape));
      EXPECT_EQ(sent_by(*plan), clipped ? (Sent{2, 2 * others}) : (Sent{3, 3 * others}));
      EXPECT_LE(plan->arenas.scratch, bytes_of(world.layout) + (4 << 20));
    }
  }
}

// Over TCP segments and windows are what they were.
TEST(StepRounds, OtherTransportsCutMessages) {
  const World world(2, 0, TransportCaps{.segment_bytes = 128 * 1024});
  const auto plan = world.plan(build_adam_step(world.shape));
  const uint64_t segments = bytes_of(world.layout) / (128 * 1024);
  EXPECT_GE(plan->traffic.total.messages_sent, segments);
  // Windows of 1.5 MiB of each rank.
  EXPECT_EQ(plan->messages.groups.size(), 2 * 428u + 1);
}

}  // namespace
}  // namespace sotto::test
