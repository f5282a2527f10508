// A step commits only when every message has arrived: in every plan of every optimizer each
// committing step comes after each receive, on every kind of device and transport. And what lower()
// refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "core/kernels/lion.h"
#include "core/optim/algorithms/adam.h"
#include "core/optim/algorithms/first_moment.h"
#include "core/optim/algorithms/lamb.h"
#include "core/optim/algorithms/onebit_adam.h"
#include "core/optim/algorithms/onebit_lamb.h"
#include "core/optim/algorithms/sgd.h"
#include "core/optim/algorithms/zeroone_step.h"
#include "tests/support/lowering.h"

namespace sotto::test {
namespace {

struct Target {
  const char* name;
  DeviceCaps device;
  TransportCaps transport;
  Matching matching = Matching::kByKey;
};

std::vector<Target> targets() {
  Target key{"by key", {}, {}, {}}, order{"by order", {}, {}, {}}, device{"device", {}, {}, {}};
  key.device.split_elements = kNormBlock;
  order.matching = Matching::kByOrder;
  device.device.synchronous = device.device.host_memory = false;
  device.device.lanes = 4;
  device.transport.host_memory_only = true;
  Target stream = device, graph = device;
  stream.name = "stream-ordered";
  stream.matching = Matching::kByOrder;
  stream.transport.stream_ordered = true;
  graph = stream;
  graph.name = "graph";
  graph.device.captures = true;
  return {key, order, device, stream, graph};
}

Result<std::shared_ptr<const Plan>> lowered(LogicalPlan plan, const Target& target, int32_t size) {
  return lower_for(std::move(plan), target.device, target.transport, target.matching, size);
}

// Of each step, whether it comes after step `of`.
std::vector<uint8_t> descendants(const Plan& plan, uint32_t of) {
  std::vector<uint8_t> after(plan.steps.size());
  after[of] = 1;
  for (uint32_t i = of + 1; i < plan.steps.size(); ++i) {
    for (const uint32_t before : plan.order.preds(i)) after[i] |= after[before];
  }
  return after;
}

// The first message of a native collective, whose messages complete together.
uint32_t stands_for(const Plan& plan, uint32_t message) {
  const NativeStep* const call = plan.steps[message].message()->native;
  while (call != nullptr && message > 0) {
    const MessageStep* const before = plan.steps[message - 1].message();
    if (before == nullptr || before->native != call) break;
    --message;
  }
  return message;
}

// Returns the number of committing steps.
int expect_gated(const Plan& plan) {
  std::vector<uint32_t> commits;
  for (uint32_t i = 0; i < plan.steps.size(); ++i) {
    if (plan.steps[i].phase == Phase::kCommitting) commits.push_back(i);
  }
  for (uint32_t i = 0; i < plan.steps.size(); ++i) {
    if (!is_receive(plan.steps[i])) continue;
    const std::vector<uint8_t> after = descendants(plan, stands_for(plan, i));
    for (const uint32_t commit : commits) {
      EXPECT_TRUE(after[commit]) << "step " << commit << " of " << plan.steps.size()
                                 << " commits without the message of step " << i;
      if (!after[commit]) return 0;
    }
  }
  return static_cast<int>(commits.size());
}

// Shapes of a step: what is done to gradients before the update. `layout` outlives them.
std::vector<std::pair<std::string, StepShape>> shapes(const CompressedLayout& layout,
                                                      int32_t rank) {
  StepShape plain;
  plain.rank = rank;
  plain.size = static_cast<int32_t>(layout.servers());
  plain.layout = &layout;
  plain.groups = 2;
  plain.sizes.segment_bytes = 16 * 1024;
  std::vector<std::pair<std::string, StepShape>> out{{"plain", plain}};
  const auto add = [&](const char* name) -> StepShape& {
    return out.emplace_back(name, plain).second;
  };
  add("clipped").clip = 1;
  add("accumulated").accumulated = true;
  add("loss scaled").loss_scaled = true;
  add("not cut").sizes = {.segment_bytes = 0, .held = {.count = 1, .bytes = 128 * 1024}};
  add("native").average.native = ~0u;
  StepShape& half = add("half");
  half.gradients = half.average.wire = half.copies.type = Dtype::kF16;
  half.copies.tensors = {0, 2};
  half.average.postscale = 0.5f;
  StepShape& all = add("all");
  all.clip = 1;
  all.accumulated = all.loss_scaled = true;
  all.valid = "valid";
  return out;
}

using Builder = std::function<StepPlan(const StepShape&)>;

// On the first and the last rank of 2, 3 and 4, in all shapes and on all targets. `without`: what
// else the tensors need.
void expect_gated_everywhere(const Builder& build, const std::vector<LayoutTensor>& tensors,
                             uint64_t align, bool scales = true) {
  for (const uint32_t ranks : {2u, 3u, 4u}) {
    const CompressedLayout layout(tensors, ranks, align, Granularity::kGroup, 0, scales);
    for (const uint32_t rank : {0u, ranks - 1}) {
      for (const auto& [name, shape] : shapes(layout, static_cast<int32_t>(rank))) {
        for (const Target& target : targets()) {
          SCOPED_TRACE(name + ", " + target.name + ", rank " + std::to_string(rank) + " of " +
                       std::to_string(ranks));
          const auto plan = lowered(build(shape).plan, target, shape.size);
          ASSERT_TRUE(plan.ok()) << plan.status().text();
          EXPECT_GT(expect_gated(**plan), 0);
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

const std::vector<LayoutTensor> kTensors{{70'001, 0}, {3, 0}, {0, 0}, {40'000, 1}};
// With a group of tensors that are averaged in full precision.
const std::vector<LayoutTensor> kMixed{{30'001, 0}, {3, 1, false}, {9'000, 0}, {20'000, 1, false}};

StepPlan build_lion(const StepShape& shape) {
  const auto update = [](StepFrame& frame, const GradientStage& gradient) {
    emit_first_moment<LionElement>(frame, gradient, true, SourceArgs{gradient.type}, {});
  };
  return build_dense_step(shape, update, false);
}

struct Dense {
  const char* name;
  StepPlan (*build)(const StepShape&);
};
const Dense kDense[] = {
    {"adam", build_adam_step},
    {"lamb", [](const StepShape& shape) { return build_lamb_step(shape, false); }},
    {"lamb_average", [](const StepShape& shape) { return build_lamb_step(shape, true); }},
    {"sgd", [](const StepShape& shape) { return build_sgd_step(shape, true, false); }},
    {"lion", build_lion},
};

class CommitGateUpdates : public testing::TestWithParam<Dense> {};

TEST_P(CommitGateUpdates, FullPrecision) { expect_gated_everywhere(GetParam().build, kTensors, 8); }

TEST_P(CommitGateUpdates, WithACodec) {
  for (const CodecKind kind : {CodecKind::kOnebit, CodecKind::kInt8, CodecKind::kBf16}) {
    const auto build = [&](StepShape shape) {
      shape.average.codec = CodecSettings{};
      shape.average.codec->kind = kind;
      shape.average.codec->block = kind == CodecKind::kInt8 ? 256 : 0;
      shape.average.postscale = 1;
      if (kind != CodecKind::kOnebit) shape.valid = {};
      return GetParam().build(shape);
    };
    expect_gated_everywhere(build, kTensors, kind == CodecKind::kInt8 ? 512 : 8,
                            kind == CodecKind::kOnebit);
  }
}

INSTANTIATE_TEST_SUITE_P(All, CommitGateUpdates, testing::ValuesIn(kDense),
                         [](const auto& dense) { return std::string(dense.param.name); });

TEST(CommitGatePlans, CompressedSteps) {
  for (const auto& tensors : {kTensors, kMixed}) {
    for (const bool lamb : {false, true}) {
      for (const bool first : {false, true}) {
        for (const bool bits : {false, true}) {
          if (first && bits) continue;
          const auto build = [&](const StepShape& shape) {
            CompressedStepRequest request;
            request.shape = shape;
            request.first = first;
            request.momentum_bits = bits;
            return lamb ? build_onebit_lamb_step(request, 0) : build_onebit_adam_step(request);
          };
          expect_gated_everywhere(build, tensors, 8);
        }
      }
    }
  }
}

TEST(CommitGatePlans, ZeroOneSteps) {
  struct Kind {
    ZeroOneUpdate update;
    bool refresh, begin;
  };
  for (const Kind kind :
       {Kind{ZeroOneUpdate::kCompressed, false, false},
        Kind{ZeroOneUpdate::kCompressed, true, false}, Kind{ZeroOneUpdate::kLocal, false, false},
        Kind{ZeroOneUpdate::kLocal, true, true}, Kind{ZeroOneUpdate::kSync, false, false},
        Kind{ZeroOneUpdate::kSync, true, true}}) {
    for (const bool compat : {false, true}) {
      const auto build = [&](StepShape shape) {
        shape.compat = compat;
        ZeroOneRequest request;
        request.shape = shape;
        request.kind = kind.update;
        request.refresh_mask = kind.refresh;
        request.begin = kind.begin;
        return build_zeroone_step(request);
      };
      expect_gated_everywhere(build, kTensors, 8);
    }
  }
}

TEST(CommitGatePlans, CollectivesThatCommit) {
  const CompressedLayout layout({{40'000, 0}, {9, 0}}, 3, 8, Granularity::kFlat);
  for (const Target& target : targets()) {
    PlanBuilder builder;
    emit_compressed_collective(builder, 1, layout, {}, std::vector<uint8_t>{1, 0}, 16 * 1024);
    const auto plan = lowered(builder.take(), target, 3);
    ASSERT_TRUE(plan.ok()) << plan.status().text();
    EXPECT_GT(expect_gated(**plan), 0);
  }
}

// A plan of two ranks that receives 64 bytes and commits what came.
struct SmallPlan {
  PlanBuilder b;
  uint32_t state = b.bound(64), flags = b.scratch(4), word = b.scratch(4), came = b.scratch(64);

  SmallPlan() {
    b.committed(state);
    b.fill({flags, 0, 4}, 0);
  }
  void receive() { b.recv(1, {came, 0, 64}, b.next_round()); }
  void decide() {
    b.kernel<kernels::Gate>(
        {.messages = whole(flags, Access::kRead, 0, 4), .word = whole(word, Access::kWrite, 0, 4)},
        {}, GateArgs{4, 1, kSkipNonfinite});
  }
  void commit() {
    KernelOptions options;
    options.phase = Phase::kCommitting;
    options.predicate = {word, 0, kCommit};
    b.copy({state, 0, 64}, {came, 0, 64}, options);
  }
  void tell() { b.set_verdict(b.host(8), word); }
  // OK, or the text.
  std::string outcome() {
    const auto plan = lowered(b.take(), targets()[0], 2);
    return plan.ok() ? "" : plan.status().text();
  }
};

TEST(CommitGatePlans, TheDecisionWaitsForMessagesThatItDoesNotRead) {
  SmallPlan p;
  p.receive();
  p.decide();
  p.commit();
  p.tell();
  const auto plan = lowered(p.b.take(), targets()[0], 2);
  ASSERT_TRUE(plan.ok()) << plan.status().text();
  EXPECT_EQ(expect_gated(**plan), 1);
  for (uint32_t i = 0; i < (*plan)->steps.size(); ++i) {
    const KernelStep* const kernel = (*plan)->steps[i].kernel();
    if (kernel == nullptr || kernel->id != KernelId::kGate) continue;
    EXPECT_TRUE(std::ranges::any_of((*plan)->order.preds(i),
                                    [&](uint32_t s) { return is_receive((*plan)->steps[s]); }));
  }
}

TEST(CommitGatePlans, RefusesPlansThatCommitTooEarly) {
  SmallPlan early;
  early.receive();
  early.commit();
  early.decide();
  early.tell();
  EXPECT_NE(early.outcome().find("(copy) commits before the decision"), std::string::npos);

  SmallPlan never;
  never.receive();
  never.commit();
  EXPECT_NE(never.outcome().find("(copy) commits before the decision"), std::string::npos);
}

TEST(CommitGatePlans, RefusesCommitsThatNothingDecides) {
  SmallPlan p;
  p.receive();
  p.decide();
  KernelOptions options;
  options.phase = Phase::kCommitting;
  options.after = {p.b.steps() - 1};
  p.b.copy({p.state, 0, 64}, {p.came, 0, 64}, options);
  p.tell();
  EXPECT_NE(p.outcome().find("(copy) commits whatever is decided"), std::string::npos);
}

TEST(CommitGatePlans, RefusesMessagesBehindTheDecision) {
  SmallPlan p;
  p.decide();
  p.tell();
  p.receive();
  EXPECT_NE(p.outcome().find("(receive from 1) comes after the decision"), std::string::npos);
}

TEST(CommitGatePlans, RefusesToWriteStateWithoutCommitting) {
  SmallPlan copied;
  copied.b.copy({copied.state, 0, 64}, {copied.came, 0, 64});
  EXPECT_NE(copied.outcome().find("(copy) writes slot 0 without committing"), std::string::npos);
  SmallPlan received;
  received.b.recv(1, {received.state, 0, 64}, 0);
  EXPECT_NE(received.outcome().find("(receive from 1) writes slot 0 without committing"),
            std::string::npos);
}

}  // namespace
}  // namespace sotto::test
