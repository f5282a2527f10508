// Kernels of outer optimizers that go over elements: differences from the anchor, norms of
// averages, and the step.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

OuterMessage message(float weight) {
  OuterMessage m{};
  m.weight = weight;
  m.version = kOuterMessageVersion;
  return m;
}

constexpr float kNone = -1.0f;  // what sums are before

enum class Difference { kDelta, kParams, kSumsAlone };

struct DeltaCase {
  DeltaCase(const Layout& layout, bool by_chunk, Difference kind, Random* random, bool specials)
      : work(KernelId::kOuterDelta),
        x(random->tensors(layout.sizes)),
        anchor(random->normal(layout.padded)) {
    if (specials) {
      for (auto& tensor : x) random->sprinkle(&tensor);
      random->sprinkle(&anchor);
    }
    bind(layout, by_chunk, kind);
  }
  DeltaCase(const Layout& layout, Difference kind, std::vector<std::vector<float>> live,
            std::vector<float> from)
      : work(KernelId::kOuterDelta), x(std::move(live)), anchor(std::move(from)) {
    bind(layout, false, kind);
  }
  void bind(const Layout& layout, bool by_chunk, Difference kind) {
    work.pieces = by_chunk ? layout.by_chunk : layout.by_tensor;
    work.set_args(OuterDeltaArgs{kind == Difference::kParams});
    auto& o = work.named<kernels::OuterDelta>();
    o.x = work.list(x);
    o.anchor = work.flat(anchor);
    if (kind != Difference::kSumsAlone) {
      o.y = work.flat(std::vector<float>(layout.padded, 9.0f));
      o.flags = work.flat(std::vector<uint32_t>{0});
    }
    o.sums =
        work.flat(std::vector<float>(by_chunk ? layout.chunk_blocks : layout.tensor_blocks, kNone));
    y_at = o.y.at();
    sums_at = o.sums.at();
    flags_at = o.flags.at();
  }
  KernelCase work;
  std::vector<std::vector<float>> x;
  std::vector<float> anchor;
  size_t y_at = 0, sums_at = 0, flags_at = 0;
};

constexpr Difference kDifferences[] = {Difference::kDelta, Difference::kParams,
                                       Difference::kSumsAlone};

TEST(KernelsOuter, DifferencesEqualTheReferenceOnEveryTarget) {
  Random random(60);
  for (const Layout& layout : all_layouts()) {
    for (const Difference kind : kDifferences) {
      for (const bool by_chunk : {false, true}) {
        for (const bool specials : {false, true}) {
          const DeltaCase delta(layout, by_chunk, kind, &random, specials);
          EXPECT_EQ(compare_on_all_targets(delta.work), "") << layout.elements();
        }
      }
    }
  }
}

TEST(KernelsOuter, DifferencesFollowTheFormulas) {
  Random random(61);
  const Layout layout = make_layout({7, 0, 65, 1, 8193, 130}, 2, 8);
  for (const Difference kind : kDifferences) {
    const DeltaCase delta(layout, false, kind, &random, false);
    const Outcome out = execute_reference(delta.work);
    const std::vector<float> sums = out.as<float>(delta.sums_at);
    for (size_t t = 0; t < layout.sizes.size(); ++t) {
      std::vector<double> expected(layout.tensor_ranges[t].blocks);
      for (uint64_t i = 0; i < layout.sizes[t]; ++i) {
        const uint64_t flat = layout.starts[t] + i;
        const float d = delta.anchor[flat] - delta.x[t][i];
        expected[i / kNormBlock] += double{d} * d;
        if (kind == Difference::kSumsAlone) continue;
        ASSERT_EQ(out.as<float>(delta.y_at)[flat], kind == Difference::kParams ? delta.x[t][i] : d);
      }
      for (uint64_t b = 0; b < expected.size(); ++b)
        ASSERT_NEAR(sums[layout.tensor_ranges[t].first_block + b], expected[b], 1e-5 * expected[b]);
    }
    if (kind != Difference::kSumsAlone) {
      EXPECT_EQ(out.as<uint32_t>(delta.flags_at)[0], 0u);
    }
  }
}

// Elements before, in and behind whole groups, and in blocks of their own.
TEST(KernelsOuter, DifferencesRaiseFlagsForWhatIsNotFinite) {
  using Limits = std::numeric_limits<float>;
  const Layout layout = make_layout({200, 9000}, 1, 8);
  const auto flags_of = [&](Difference kind, size_t t, size_t i, float x, float anchor) {
    std::vector<std::vector<float>> live;
    for (const uint64_t size : layout.sizes) live.emplace_back(size, 1.0f);
    std::vector<float> from(layout.padded, 2.0f);
    live[t][i] = x;
    from[layout.starts[t] + i] = anchor;
    const DeltaCase delta(layout, kind, live, from);
    EXPECT_EQ(compare_on_all_targets(delta.work), "");
    return execute_reference(delta.work).as<uint32_t>(delta.flags_at)[0];
  };
  for (const size_t i : {0u, 64u, 127u, 199u}) {
    EXPECT_EQ(flags_of(Difference::kDelta, 0, i, Limits::quiet_NaN(), 0), kFlagNonfinite);
    EXPECT_EQ(flags_of(Difference::kDelta, 0, i, 0, Limits::infinity()), kFlagNonfinite);
    EXPECT_EQ(flags_of(Difference::kDelta, 0, i, Limits::max(), -Limits::max()), kFlagNonfinite);
    EXPECT_EQ(flags_of(Difference::kDelta, 0, i, Limits::max(), 1), 0u);
    EXPECT_EQ(flags_of(Difference::kParams, 0, i, -Limits::infinity(), 0), kFlagNonfinite);
    EXPECT_EQ(flags_of(Difference::kParams, 0, i, 0, Limits::quiet_NaN()), 0u);
  }
  EXPECT_EQ(flags_of(Difference::kDelta, 1, 8999, Limits::quiet_NaN(), 0), kFlagNonfinite);
}

TEST(KernelsOuter, PaddingIsLeftAloneAndItsBlocksAreZero) {
  Random random(62);
  const Layout layout = make_layout({100}, 4, 512);  // three chunks of padding
  const DeltaCase delta(layout, true, Difference::kDelta, &random, false);
  const Outcome out = execute_reference(delta.work);
  const std::vector<float> y = out.as<float>(delta.y_at), sums = out.as<float>(delta.sums_at);
  ASSERT_EQ(y.size(), 2048u);
  for (size_t i = 100; i < y.size(); ++i) ASSERT_EQ(y[i], 9.0f);
  EXPECT_GT(sums[0], 0.0f);
  for (size_t b = 1; b < 4; ++b) EXPECT_EQ(sums[b], 0.0f);
}

KernelCase norm_case(const Layout& layout, bool by_chunk, bool params, uint32_t divided,
                     const std::vector<float>& sum, const std::vector<float>& anchor) {
  KernelCase work(KernelId::kOuterNorm);
  work.pieces = by_chunk ? layout.by_chunk : layout.by_tensor;
  work.set_args(OuterNormArgs{4, divided});
  auto& o = work.named<kernels::OuterNorm>();
  o.sum = work.flat(sum);
  if (params) o.anchor = work.flat(anchor);
  o.messages = work.flat(std::vector<OuterMessage>{message(1), message(0), message(1), message(1)});
  o.sums =
      work.flat(std::vector<float>(by_chunk ? layout.chunk_blocks : layout.tensor_blocks, kNone));
  return work;
}

TEST(KernelsOuter, NormsEqualTheReferenceOnEveryTarget) {
  Random random(63);
  for (const Layout& layout : all_layouts()) {
    for (const int variant : {0, 1, 2, 3}) {
      std::vector<float> sum = random.normal(layout.padded);
      std::vector<float> anchor = random.normal(layout.padded);
      if ((variant & 2) != 0) random.sprinkle(&sum);
      for (const bool by_chunk : {false, true}) {
        const KernelCase work =
            norm_case(layout, by_chunk, variant & 1, variant & 2 ? 4 : 1, sum, anchor);
        EXPECT_EQ(compare_on_all_targets(work), "") << layout.elements() << ", " << variant;
      }
    }
  }
}

TEST(KernelsOuter, NormsAreThoseOfTheAverageOverRanksThatTakePart) {
  Random random(64);
  const Layout layout = make_layout({200}, 1, 8);
  const std::vector<float> sum = random.normal(200), anchor = random.normal(200);
  for (const bool params : {false, true}) {
    for (const uint32_t divided : {0, 1, 4}) {
      KernelCase work = norm_case(layout, false, params, divided, sum, anchor);
      const size_t at = work.named<kernels::OuterNorm>().sums.at();
      double expected = 0;
      for (size_t i = 0; i < 200; ++i) {
        const double mean = divided == 0 ? sum[i] : divided * sum[i] / 3.0;
        const double u = params ? anchor[i] - mean : mean;
        expected += u * u;
      }
      EXPECT_NEAR(execute_reference(work).as<float>(at)[0], expected, 1e-5 * expected);
    }
  }
}

// One rank for every thread of a block and some more, none of which takes part but the last.
TEST(KernelsOuter, NormsCountManyRanks) {
  for (const uint32_t world : {1u, 255u, 256u, 257u, 600u}) {
    KernelCase work =
        norm_case(make_layout({8}, 1, 8), false, false, 1, std::vector<float>(8, 2.0f), {});
    work.set_args(OuterNormArgs{world, 1});
    std::vector<OuterMessage> messages(world, message(0));
    messages.back().weight = 1;
    auto& o = work.named<kernels::OuterNorm>();
    o.messages = work.flat(messages);
    EXPECT_EQ(compare_on_all_targets(work), "") << world;
    EXPECT_EQ(execute_reference(work).as<float>(o.sums.at())[0], 32.0f) << world;
  }
}

// What a call of the step has of its optional operands.
struct Given {
  bool sum = true, launch_anchor = false, last_step = false, fresh = false, previous = false,
       x = true, factors = true, sums = true, clipped = true;
};

// Memory of all steps on a layout, and calls on it.
struct StepMemory {
  StepMemory(const Layout& l, Random* random, bool specials) : layout(l) {
    for (auto* values :
         {&sum, &launch_anchor, &last_step, &fresh, &previous, &x_launch, &m, &anchor}) {
      *values = random->normal(layout.padded);
      if (specials) random->sprinkle(values);
    }
    x = random->tensors(layout.sizes);
    if (specials) {
      for (auto& tensor : x) random->sprinkle(&tensor);
    }
    numbers.gamma = 0.25;
    numbers.mean = 1.0f / 3;
    numbers.alpha = 0.7f;
    numbers.last_alpha = 0.9f;
    numbers.beta = 0.6f;
    numbers.freshness = 0.3f;
    numbers.limit = 0.5f;
    numbers.shrink = 0.8f;
    factors.resize(layout.sizes.size());
    for (size_t t = 0; t < factors.size(); ++t)
      factors[t].inv_lambda = 1.0f / static_cast<float>(t + 2);
  }

  Layout layout;
  std::vector<float> sum, launch_anchor, last_step, fresh, previous, x_launch, m, anchor;
  std::vector<std::vector<float>> x;
  OuterNumbers numbers;
  std::vector<OuterFactor> factors;
};

struct StepCase {
  StepCase(const StepMemory& s, const OuterStepArgs& args, const Given& given, bool by_chunk)
      : work(KernelId::kOuterStep) {
    work.pieces = by_chunk ? s.layout.by_chunk : s.layout.by_tensor;
    work.set_args(args);
    const std::vector<float> blocks(by_chunk ? s.layout.chunk_blocks : s.layout.tensor_blocks,
                                    kNone);
    auto& o = work.named<kernels::OuterStep>();
    if (given.sum) o.sum = work.flat(s.sum);
    if (given.launch_anchor) o.launch_anchor = work.flat(s.launch_anchor);
    if (given.last_step) o.last_step = work.flat(s.last_step);
    if (given.fresh) o.fresh = work.flat(s.fresh);
    if (given.previous) o.previous = work.flat(s.previous);
    if (args.merge == OuterMerge::kAddProgress) o.x_launch = work.flat(s.x_launch);
    if (args.pass != OuterPass::kMerge) {
      o.numbers = work.flat(std::vector<OuterNumbers>{s.numbers});
      if (given.factors) o.factors = work.flat(s.factors);
    }
    if (args.rule != OuterRule::kNone) o.m = work.flat(s.m);
    o.anchor = work.flat(s.anchor);
    if (given.x) o.x = work.list(s.x);
    if (given.sums) {
      o.step_sums = work.flat(blocks);
      o.m_sums = work.flat(blocks);
    }
    if (given.clipped) o.clipped = work.flat(blocks);
  }
  KernelCase work;
};

// Whether the contract asks for last_step.
bool needs_last_step(const OuterStepArgs& a) {
  const bool replaced = a.pass == OuterPass::kUpdate && a.rule == OuterRule::kNesterov;
  return (a.anchor_diff || a.penalty.element) && (replaced || a.rule == OuterRule::kNone);
}

// What most calls have.
Given usual_operands(const OuterStepArgs& a, bool fresh) {
  Given g;
  g.sum = a.pass != OuterPass::kUpdate || a.rule != OuterRule::kHeavyBall;
  g.launch_anchor = a.params && !a.anchor_diff;
  g.last_step = needs_last_step(a);
  g.fresh = g.previous = fresh;
  return g;
}

// What the contract asks for, and some of the others.
Given random_operands(const OuterStepArgs& a, bool fresh, Random* random) {
  const auto some = [&] { return random->below(3) != 0; };
  Given g;
  g.sum = some() || (a.rule == OuterRule::kNone && a.params);
  g.launch_anchor = a.params && some();
  g.last_step = some() || needs_last_step(a);
  g.fresh = fresh;
  g.previous = fresh && some();
  g.x = some();
  g.factors = some();
  g.sums = some();
  g.clipped = some();
  return g;
}

OuterStepArgs arguments(OuterPass pass, OuterRule rule, OuterMerge merge, OuterClip clip) {
  OuterStepArgs a;
  a.pass = pass;
  a.rule = rule;
  a.merge = merge;
  a.clip = clip;
  a.a = 0.6f;
  a.one_minus_a = 0.4f;
  a.penalty.lambda_max = 3;
  a.penalty.floor = 1.25;
  return a;
}

using VisitStep = std::function<void(const OuterStepArgs&, bool fresh)>;

// All forms, payloads and penalties of one step.
void for_each_form(OuterStepArgs a, const VisitStep& visit) {
  for (const uint32_t bits : {0u, 1u, 2u, 3u, 4u, 5u, 6u, 7u}) {
    a.anchor_diff = bits & 1;
    a.params = bits & 2;
    a.penalty.element = bits & 4;
    for (const bool stale : {true, false}) {
      a.penalty.stale = stale;
      if (!stale && !a.penalty.element) continue;
      for (const bool fresh : {false, true}) visit(a, fresh);
    }
  }
}

void for_each_step(const VisitStep& visit) {
  constexpr OuterMerge kMerges[] = {OuterMerge::kReset, OuterMerge::kLerp, OuterMerge::kAddProgress,
                                    OuterMerge::kPull};
  constexpr OuterClip kClips[] = {OuterClip::kNone, OuterClip::kCoordinate, OuterClip::kNorm,
                                  OuterClip::kRms};
  for (const OuterMerge merge : kMerges) {
    visit(arguments(OuterPass::kMerge, OuterRule::kHeavyBall, merge, OuterClip::kNone), false);
    for_each_form(arguments(OuterPass::kWhole, OuterRule::kNone, merge, OuterClip::kNone), visit);
    for (const OuterRule rule : {OuterRule::kHeavyBall, OuterRule::kNesterov}) {
      for (const OuterClip clip : kClips) {
        for_each_form(arguments(OuterPass::kWhole, rule, merge, clip), visit);
        for_each_form(arguments(OuterPass::kUpdate, rule, merge, clip), visit);
      }
    }
  }
  for (const OuterRule rule : {OuterRule::kHeavyBall, OuterRule::kNesterov})
    for_each_form(arguments(OuterPass::kMomentum, rule, OuterMerge::kReset, OuterClip::kNone),
                  visit);
}

std::string name_of(const OuterStepArgs& a, const Given& g) {
  std::string out;
  for (const int number :
       {static_cast<int>(a.pass), static_cast<int>(a.rule), static_cast<int>(a.merge),
        static_cast<int>(a.clip), int{a.anchor_diff}, int{a.params}, int{a.penalty.element},
        int{a.penalty.stale}, static_cast<int>(a.factors), int{g.sum}, int{g.launch_anchor},
        int{g.last_step}, int{g.fresh}, int{g.previous}, int{g.x}, int{g.factors}})
    out += std::to_string(number) + " ";
  return out;
}

TEST(KernelsOuter, EveryStepEqualsTheReferenceOnEveryTarget) {
  Random random(65);
  const Layout layout = make_layout({7, 0, 65, 1, 130, 199}, 2, 8);
  const StepMemory plain(layout, &random, false), special(layout, &random, true);
  for_each_step([&](OuterStepArgs a, bool fresh) {
    for (const bool usual : {true, false}) {
      if (random.below(2) != 0) a.factors = static_cast<uint32_t>(layout.sizes.size());
      const Given given = usual ? usual_operands(a, fresh) : random_operands(a, fresh, &random);
      const StepMemory& memory = random.below(2) != 0 ? special : plain;
      const StepCase step(memory, a, given, random.below(2) != 0);
      ASSERT_EQ(compare_on_all_targets(step.work), "") << name_of(a, given);
    }
  });
}

TEST(KernelsOuter, StepsEqualTheReferenceOnAllLayouts) {
  Random random(66);
  std::vector<std::pair<OuterStepArgs, bool>> all;
  for_each_step([&](const OuterStepArgs& a, bool fresh) { all.emplace_back(a, fresh); });
  for (const Layout& layout : all_layouts()) {
    const StepMemory memory(layout, &random, random.below(2) != 0);
    for (int i = 0; i < 10; ++i) {
      auto [a, fresh] = all[random.below(static_cast<uint32_t>(all.size()))];
      a.factors = static_cast<uint32_t>(layout.sizes.size());
      const Given given =
          i % 2 == 0 ? usual_operands(a, fresh) : random_operands(a, fresh, &random);
      const StepCase step(memory, a, given, random.below(2) != 0);
      ASSERT_EQ(compare_on_all_targets(step.work), "")
          << layout.elements() << ": " << name_of(a, given);
    }
  }
}

TEST(KernelsOuter, CommonStepsEqualTheReferenceOnAllLayouts) {
  Random random(70);
  const std::pair<OuterPass, OuterClip> kinds[] = {
      {OuterPass::kWhole, OuterClip::kNone},    {OuterPass::kWhole, OuterClip::kCoordinate},
      {OuterPass::kMomentum, OuterClip::kNone}, {OuterPass::kUpdate, OuterClip::kRms},
      {OuterPass::kUpdate, OuterClip::kNorm},
  };
  for (const Layout& layout : all_layouts()) {
    const StepMemory memory(layout, &random, random.below(2) != 0);
    for (const OuterRule rule : {OuterRule::kHeavyBall, OuterRule::kNesterov}) {
      for (const auto& [pass, clip] : kinds) {
        const OuterStepArgs a = arguments(pass, rule, OuterMerge::kReset, clip);
        const StepCase step(memory, a, Given(), random.below(2) != 0);
        ASSERT_EQ(compare_on_all_targets(step.work), "")
            << layout.elements() << ": " << name_of(a, Given());
      }
    }
  }
}

// One element of a step, written as the specification does (section 13).
struct Element {
  float m, last_step, anchor, x, change;
  bool clipped = false;
};

float inverse_of_element(const OuterStepArgs& a, const OuterNumbers& n, float u, float last) {
  double lambda = 1;
  const float gap = std::fabs(n.last_alpha * last);
  if (a.penalty.stale && gap != 0)
    lambda = std::min(1 + gap / (std::fabs(u) + 1e-12), a.penalty.lambda_max);
  return static_cast<float>(1 / (n.gamma * std::max(lambda, a.penalty.floor)));
}

float gradient_of(const StepMemory& s, const OuterStepArgs& a, const Given& given, size_t t,
                  uint64_t flat) {
  const OuterNumbers& n = s.numbers;
  const bool has_m = a.rule != OuterRule::kNone;
  const float last = given.last_step ? s.last_step[flat] : has_m ? s.m[flat] : 0.0f;
  float u = given.sum ? s.sum[flat] * n.mean : 0.0f;
  if (a.params) u = (given.launch_anchor ? s.launch_anchor : s.anchor)[flat] - u;
  float d = u;
  if (a.anchor_diff) d = u - n.last_alpha * last;
  float inverse = given.factors ? s.factors[a.factors > 1 ? t : 0].inv_lambda : 1.0f;
  if (a.penalty.element) inverse = inverse_of_element(a, n, u, last);
  const float v = d * inverse;
  if (!given.fresh) return v;
  const float previous = given.previous ? s.previous[flat] : 0.0f;
  return v + n.freshness * ((s.fresh[flat] - previous) + (d - v));
}

void clip_momentum(const OuterStepArgs& a, const OuterNumbers& n, Element* e) {
  const float before = e->m;
  if (a.clip == OuterClip::kNorm) e->m *= n.shrink;
  if (a.clip == OuterClip::kCoordinate || a.clip == OuterClip::kRms)
    e->m = std::min(std::max(e->m, -n.limit), n.limit);
  e->clipped = e->m != before;
}

float merged(const StepMemory& s, const OuterStepArgs& a, float x, float anchor, uint64_t flat) {
  if (a.merge == OuterMerge::kLerp) return a.a * x + a.one_minus_a * anchor;
  if (a.merge == OuterMerge::kPull) return a.one_minus_a * x + a.a * anchor;
  if (a.merge == OuterMerge::kAddProgress) return anchor + (x - s.x_launch[flat]);
  return anchor;
}

Element expected_element(const StepMemory& s, const OuterStepArgs& a, const Given& given, size_t t,
                         uint64_t i) {
  const OuterNumbers& n = s.numbers;
  const uint64_t flat = s.layout.starts[t] + i;
  Element e{s.m[flat], s.last_step[flat], s.anchor[flat], s.x[t][i], 0};
  if (a.pass != OuterPass::kMerge) {
    const float g = gradient_of(s, a, given, t, flat);
    if (a.pass != OuterPass::kUpdate && a.rule != OuterRule::kNone) e.m = n.beta * e.m + g;
    if (a.pass == OuterPass::kMomentum) return e;
    float step = g;
    if (a.rule != OuterRule::kNone) {
      clip_momentum(a, n, &e);
      step = a.rule == OuterRule::kNesterov ? n.beta * e.m + g : e.m;
    }
    e.change = n.alpha * step;
    e.anchor -= e.change;
    if (a.rule == OuterRule::kNone && a.params) {
      e.anchor = s.sum[flat] * n.mean;
      e.change = step = s.anchor[flat] - e.anchor;
    }
    e.last_step = step;
  }
  if (given.x) e.x = merged(s, a, e.x, e.anchor, flat);
  return e;
}

// The values of a step of small tensors, one norm block each.
void expect_formulas(const StepMemory& s, const OuterStepArgs& a, const Given& given) {
  StepCase step(s, a, given, false);
  auto& o = step.work.named<kernels::OuterStep>();
  const Outcome out = execute_reference(step.work);
  ASSERT_EQ(out.error, "");
  const auto flat_of = [&](const OperandMemory& operand, const std::vector<float>& otherwise) {
    return operand.memory.empty() ? otherwise : out.as<float>(operand.at());
  };
  const std::vector<float> m = flat_of(o.m, s.m), anchor = flat_of(o.anchor, s.anchor),
                           last_step = flat_of(o.last_step, s.last_step);
  const bool moves = a.pass == OuterPass::kWhole || a.pass == OuterPass::kUpdate;
  for (size_t t = 0; t < s.x.size(); ++t) {
    if (s.x[t].empty()) continue;
    double changes = 0, momenta = 0;
    float clipped = 0;
    for (uint64_t i = 0; i < s.x[t].size(); ++i) {
      const Element e = expected_element(s, a, given, t, i);
      const uint64_t flat = s.layout.starts[t] + i;
      ASSERT_EQ(m[flat], e.m);
      ASSERT_EQ(anchor[flat], e.anchor);
      if (given.last_step) {
        ASSERT_EQ(last_step[flat], e.last_step);
      }
      if (given.x) {
        ASSERT_EQ(out.as<float>(o.x.memory[t])[i], e.x);
      }
      changes += double{e.change} * e.change;
      momenta += double{e.m} * e.m;
      clipped += e.clipped ? 1.0f : 0.0f;
    }
    const uint64_t block = s.layout.tensor_ranges[t].first_block;
    const auto expect_sum = [&](const OperandMemory& operand, bool made, double value) {
      if (operand.memory.empty()) return;
      const double sum = out.as<float>(operand.at())[block];
      ASSERT_NEAR(sum, made ? value : double{kNone}, 1e-5 * std::fabs(value));
    };
    expect_sum(o.step_sums, moves, changes);
    expect_sum(o.m_sums, a.pass == OuterPass::kMomentum, momenta);
    expect_sum(o.clipped, moves, clipped);
  }
}

TEST(KernelsOuter, EveryStepFollowsTheFormulas) {
  Random random(67);
  const StepMemory memory(make_layout({7, 0, 65, 1, 130}, 2, 8), &random, false);
  for_each_step([&](OuterStepArgs a, bool fresh) {
    if (random.below(2) != 0) a.factors = static_cast<uint32_t>(memory.x.size());
    const Given given = random_operands(a, fresh, &random);
    SCOPED_TRACE(name_of(a, given));
    expect_formulas(memory, a, given);
  });
}

TEST(KernelsOuter, ClipsKeepWhatIsNotANumber) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Random random(68);
  StepMemory memory(make_layout({130}, 1, 8), &random, false);
  memory.m[3] = memory.m[70] = nan;
  memory.m[80] = std::numeric_limits<float>::infinity();
  for (const OuterClip clip : {OuterClip::kCoordinate, OuterClip::kRms, OuterClip::kNorm}) {
    StepCase step(memory,
                  arguments(OuterPass::kWhole, OuterRule::kHeavyBall, OuterMerge::kReset, clip),
                  Given(), false);
    EXPECT_EQ(compare_on_all_targets(step.work), "");
    const auto& o = step.work.named<kernels::OuterStep>();
    const std::vector<float> m = execute_reference(step.work).as<float>(o.m.at());
    EXPECT_TRUE(std::isnan(m[3]));
    EXPECT_TRUE(std::isnan(m[70]));
    if (clip != OuterClip::kNorm) {
      EXPECT_EQ(m[80], 0.5f);
    }
  }
}

TEST(KernelsOuter, TwoPassesGiveWhatOneDoes) {
  Random random(69);
  const StepMemory memory(make_layout({7, 65, 130}, 1, 8), &random, false);
  for (const OuterRule rule : {OuterRule::kHeavyBall, OuterRule::kNesterov}) {
    Given given;
    given.last_step = true;
    OuterStepArgs a = arguments(OuterPass::kWhole, rule, OuterMerge::kLerp, OuterClip::kRms);
    a.anchor_diff = true;
    StepCase whole(memory, a, given, false);
    const auto& o = whole.work.named<kernels::OuterStep>();
    const Outcome at_once = execute_reference(whole.work);
    StepMemory between = memory;
    a.pass = OuterPass::kMomentum;
    const Outcome first = execute_reference(StepCase(memory, a, given, false).work);
    between.m = first.as<float>(o.m.at());
    a.pass = OuterPass::kUpdate;
    const Outcome second = execute_reference(StepCase(between, a, given, false).work);
    for (const OperandMemory* operand : {&o.m, &o.anchor, &o.last_step, &o.x, &o.step_sums})
      EXPECT_EQ(second.memory[operand->at()], at_once.memory[operand->at()]);
    EXPECT_EQ(first.memory[o.anchor.at()], whole.work.memory[o.anchor.at()].bytes);
  }
}

}  // namespace
}  // namespace sotto::test
