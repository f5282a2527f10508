// Adam, AdamW, LAMB, gradient norms and clipping.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>

#include "core/base/bits.h"
#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

template <class T>
T shared_scalars(float lr, float wd) {
  T s;
  s.lr = lr;
  s.b1 = 0.9f;
  s.one_minus_b1 = 0.1f;
  s.b2 = 0.999f;
  s.one_minus_b2 = static_cast<float>(1 - 0.999);
  s.eps = 1e-6f;
  s.weight_decay = wd;
  return s;
}

AdamGroupScalars scalars(float lr = 0.01f, float wd = 0.0f) {
  return shared_scalars<AdamGroupScalars>(lr, wd);
}

LambGroupScalars lamb_scalars(float lr = 0.01f, float wd = 0.0f) {
  auto s = shared_scalars<LambGroupScalars>(lr, wd);
  s.lamb_lr = lr;
  s.max_coeff = 10;
  s.min_coeff = 0.01;
  return s;
}

struct AdamCase {
  AdamCase(const Layout& layout, const std::vector<AdamGroupScalars>& groups, Random* random,
           bool specials, const float* clip, const std::vector<uint8_t>* valid)
      : work(KernelId::kAdam), g(random->tensors(layout.sizes)), p(random->tensors(layout.sizes)) {
    work.pieces = layout.by_tensor;
    work.set_args(SourceArgs{});
    m = random->normal(layout.padded, 0.1f);
    v = random->positive(layout.padded, 0.01f, 0.0f);
    if (specials) {
      for (auto& tensor : g) random->sprinkle(&tensor);
      for (auto& tensor : p) random->sprinkle(&tensor);
      random->sprinkle(&m);
      random->sprinkle(&v);
    }
    auto& o = work.named<kernels::Adam>();
    o.g = work.list(g);
    o.m = work.flat(m);
    m_at = o.m.at();
    o.v = work.flat(v);
    v_at = o.v.at();
    o.p = work.list(p);
    p_at = o.p.at();
    o.scalars = work.flat(groups);
    if (clip != nullptr) o.clip = work.flat(std::vector<float>{*clip});
    if (valid != nullptr) o.valid = work.flat(*valid);
  }
  KernelCase work;
  std::vector<std::vector<float>> g, p;
  std::vector<float> m, v;
  size_t m_at = 0, v_at = 0, p_at = 0;
};

std::vector<AdamGroupScalars> adam_groups() {
  std::vector<AdamGroupScalars> groups = {scalars(), scalars(0.02f, 0.1f), scalars(0.03f, 0.05f)};
  groups[0].c1 = 0.19f;
  groups[0].c2 = 0.002f;
  groups[2].decoupled = 0;
  return groups;
}

TEST(KernelsAdam, EveryTargetEqualsTheReference) {
  Random random(20);
  const float clip = 0.37f;
  for (Layout layout : all_layouts()) {
    for (const int variant : {0, 1, 2, 3}) {
      SCOPED_TRACE(std::to_string(layout.elements()) + " variant " + std::to_string(variant));
      const std::vector<uint8_t> valid = random.mask(layout.padded);
      for (Piece& p : layout.by_tensor) p.group = (p.tensor + static_cast<uint32_t>(variant)) % 3;
      AdamCase adam(layout, adam_groups(), &random, variant & 1, variant & 1 ? &clip : nullptr,
                    variant & 2 ? &valid : nullptr);
      EXPECT_EQ(compare_on_all_targets(adam.work), "");
      EXPECT_EQ(compare_low_precision_sources<SourceArgs>(adam.work), "");
    }
  }
}

TEST(KernelsAdam, FollowsTheFormulas) {
  Random random(21);
  const float clip = 0.5f;
  const Layout layout = make_layout({7, 0, 65, 1, 8193, 130}, 2, 8, 3);
  const std::vector<AdamGroupScalars> groups = adam_groups();
  const std::vector<uint8_t> valid = random.mask(layout.padded);
  AdamCase adam(layout, groups, &random, false, &clip, &valid);
  const Outcome out = execute_reference(adam.work);
  const std::vector<float> m = out.as<float>(adam.m_at), v = out.as<float>(adam.v_at);
  for (size_t t = 0; t < layout.sizes.size(); ++t) {
    const AdamGroupScalars& s = groups[t % 3];
    const std::vector<float> p = out.as<float>(adam.p_at + t);
    for (uint64_t i = 0; i < layout.sizes[t]; ++i) {
      const uint64_t flat = layout.starts[t] + i;
      double g = get_bit(valid.data(), flat) ? adam.g[t][i] * 0.5 : 0.0;
      if (s.decoupled == 0) g += s.weight_decay * adam.p[t][i];
      const double new_m = 0.9 * adam.m[flat] + 0.1 * g;
      const double new_v = 0.999 * adam.v[flat] + 0.001 * g * g;
      double u = (new_m / s.c1) / (std::sqrt(new_v / s.c2) + 1e-6);
      if (s.decoupled != 0) u += s.weight_decay * adam.p[t][i];
      ASSERT_NEAR(m[flat], new_m, 1e-6);
      ASSERT_NEAR(v[flat], new_v, 1e-7);
      ASSERT_NEAR(p[i], adam.p[t][i] - s.lr * u, 2e-6 + 1e-5 * s.lr * std::fabs(u));
    }
  }
}

// p = (3, 4), gradients (1, -2) then (0.5, 0.5), lr 0.1, eps 1e-8, wd 0.1.
std::vector<float> two_adam_steps(bool decoupled, bool corrected) {
  AdamGroupScalars s = scalars(0.1f, 0.1f);
  s.lr = 0.1;
  s.eps = 1e-8f;
  s.decoupled = decoupled;
  std::vector<float> p = {3, 4}, m = {0, 0}, v = {0, 0};
  const std::vector<std::vector<float>> gradients = {{1, -2}, {0.5f, 0.5f}};
  for (int t = 1; t <= 2; ++t) {
    if (corrected) {
      s.c1 = static_cast<float>(1 - std::pow(0.9, t));
      s.c2 = static_cast<float>(1 - std::pow(0.999, t));
    }
    KernelCase work(KernelId::kAdam);
    Piece piece;
    piece.count = 2;
    work.pieces = {piece};
    work.set_args(SourceArgs{});
    auto& o = work.named<kernels::Adam>();
    o.g = work.list(std::vector<std::vector<float>>{gradients[static_cast<size_t>(t - 1)]});
    o.m = work.flat(m);
    const size_t m_at = o.m.at();
    o.v = work.flat(v);
    const size_t v_at = o.v.at();
    o.p = work.list(std::vector<std::vector<float>>{p});
    const size_t p_at = o.p.at();
    o.scalars = work.flat(std::vector<AdamGroupScalars>{s});
    const Outcome out = execute_reference(work);
    m = out.as<float>(m_at);
    v = out.as<float>(v_at);
    p = out.as<float>(p_at);
  }
  return p;
}

TEST(KernelsAdam, VectorsOfTheSpecification) {
  const auto expect = [](const std::vector<float>& p, float a, float b) {
    EXPECT_NEAR(p[0], a, 2e-6f * a + 2e-7f);
    EXPECT_NEAR(p[1], b, 2e-6f * b + 2e-7f);
  };
  expect(two_adam_steps(true, true), 2.7480819f, 4.0663466f);
  expect(two_adam_steps(true, false), 2.2310965f, 4.4329705f);
  expect(two_adam_steps(false, true), 2.8040874f, 4.1214347f);
  expect(two_adam_steps(false, false), 2.2777095f, 4.4030905f);
}

struct MomentsCase {
  MomentsCase(const Layout& layout, const std::vector<LambGroupScalars>& groups, Random* random,
              bool specials, const float* clip, const std::vector<uint8_t>* valid)
      : work(KernelId::kLambMoments),
        g(random->tensors(layout.sizes)),
        p(random->tensors(layout.sizes)) {
    work.pieces = layout.by_tensor;
    work.set_args(SourceArgs{});
    m = random->normal(layout.padded, 0.1f);
    v = random->positive(layout.padded, 0.01f, 0.0f);
    if (specials) {
      for (auto& tensor : g) random->sprinkle(&tensor);
      for (auto& tensor : p) random->sprinkle(&tensor);
      random->sprinkle(&m);
      random->sprinkle(&v);
    }
    auto& o = work.named<kernels::LambMoments>();
    o.g = work.list(g);
    o.m = work.flat(m);
    m_at = o.m.at();
    o.v = work.flat(v);
    v_at = o.v.at();
    o.p = work.list(p);
    o.p_sums = work.flat(std::vector<float>(layout.tensor_blocks, -1.0f));
    p_sums = o.p_sums.at();
    o.u_sums = work.flat(std::vector<float>(layout.tensor_blocks, -1.0f));
    u_sums = o.u_sums.at();
    o.scalars = work.flat(groups);
    if (clip != nullptr) o.clip = work.flat(std::vector<float>{*clip});
    if (valid != nullptr) o.valid = work.flat(*valid);
    std::vector<std::vector<float>> directions;
    for (uint64_t size : layout.sizes) directions.emplace_back(size, -1.0f);
    o.u = work.list(directions);
    u_at = o.u.at();
  }
  // Directions take the gradients' place.
  void in_place() {
    auto& o = work.named<kernels::LambMoments>();
    o.u = o.g;
  }
  KernelCase work;
  std::vector<std::vector<float>> g, p;
  std::vector<float> m, v;
  size_t m_at = 0, v_at = 0, p_sums = 0, u_sums = 0, u_at = 0;
};

std::vector<LambGroupScalars> lamb_groups() {
  std::vector<LambGroupScalars> groups = {lamb_scalars(), lamb_scalars(0.02f, 0.1f),
                                          lamb_scalars(0.03f, 0.05f), lamb_scalars()};
  groups[2].eps_inside_sqrt = 1;
  groups[3].eps_inside_sqrt = 1;
  return groups;
}

TEST(KernelsLamb, EveryTargetEqualsTheReference) {
  Random random(22);
  const float clip = 0.37f;
  for (Layout layout : all_layouts()) {
    for (const int variant : {0, 1, 2, 3, 4, 5, 6, 7}) {
      SCOPED_TRACE(std::to_string(layout.elements()) + " variant " + std::to_string(variant));
      for (Piece& p : layout.by_tensor) p.group = (p.tensor + static_cast<uint32_t>(variant)) % 4;
      const std::vector<uint8_t> valid = random.mask(layout.padded);
      MomentsCase moments(layout, lamb_groups(), &random, variant & 1,
                          variant & 1 ? &clip : nullptr, variant & 4 ? &valid : nullptr);
      EXPECT_EQ(compare_on_all_targets(moments.work), "");
      EXPECT_EQ(compare_low_precision_sources<SourceArgs>(moments.work), "");
      moments.in_place();
      EXPECT_EQ(compare_on_all_targets(moments.work), "");
      KernelCase update(KernelId::kLambUpdate);
      update.pieces = layout.by_tensor;
      std::vector<std::vector<float>> directions = random.tensors(layout.sizes);
      if (variant & 1) {
        for (auto& tensor : directions) random.sprinkle(&tensor);
      }
      auto& o = update.named<kernels::LambUpdate>();
      o.u = update.list(directions);
      o.p = update.list(moments.p);
      std::vector<TensorStep> steps(layout.sizes.size());
      for (size_t t = 0; t < steps.size(); ++t)
        steps[t].step_size = 0.01f * static_cast<float>(t + 1);
      o.steps = update.flat(steps);
      EXPECT_EQ(compare_on_all_targets(update), "");
    }
  }
}

TEST(KernelsLamb, FollowsTheFormulas) {
  Random random(23);
  const Layout layout = make_layout({7, 0, 65, 1, 8193, 30000}, 2, 8, 4);
  const std::vector<LambGroupScalars> groups = lamb_groups();
  const std::vector<uint8_t> valid = random.mask(layout.padded);
  MomentsCase moments(layout, groups, &random, false, nullptr, &valid);
  const Outcome out = execute_reference(moments.work);
  const std::vector<float> m = out.as<float>(moments.m_at), v = out.as<float>(moments.v_at);
  const std::vector<float> p_sums = out.as<float>(moments.p_sums),
                           u_sums = out.as<float>(moments.u_sums);
  for (size_t t = 0; t < layout.sizes.size(); ++t) {
    const LambGroupScalars& s = groups[t % 4];
    const std::vector<float> directions = out.as<float>(moments.u_at + t);
    double p_norm = 0, u_norm = 0, p_found = 0, u_found = 0;
    for (uint64_t i = 0; i < layout.sizes[t]; ++i) {
      const uint64_t flat = layout.starts[t] + i;
      const double g = get_bit(valid.data(), flat) ? moments.g[t][i] : 0.0;
      const double new_m = 0.9 * moments.m[flat] + 0.1 * g;
      const double new_v = 0.999 * moments.v[flat] + 0.001 * g * g;
      ASSERT_NEAR(m[flat], new_m, 1e-6);
      ASSERT_NEAR(v[flat], new_v, 1e-7);
      const double den =
          s.eps_inside_sqrt != 0 ? std::sqrt(v[flat] + 1e-6) : std::sqrt(v[flat]) + 1e-6;
      const double u = m[flat] / den + s.weight_decay * moments.p[t][i];
      ASSERT_NEAR(directions[i], u, 1e-6 + 1e-6 * std::fabs(u));
      p_norm += std::pow(moments.p[t][i], 2);
      u_norm += u * u;
    }
    for (uint64_t b = 0; b < layout.tensor_ranges[t].blocks; ++b) {
      p_found += p_sums[layout.tensor_ranges[t].first_block + b];
      u_found += u_sums[layout.tensor_ranges[t].first_block + b];
    }
    EXPECT_NEAR(p_found, p_norm, 1e-5 * p_norm);
    EXPECT_NEAR(u_found, u_norm, 1e-5 * u_norm);
  }
}

// Whole LAMB steps on one tensor through the three kernels.
struct Lamb {
  std::vector<float> p, m = std::vector<float>(2, 0.0f), v = std::vector<float>(2, 0.0f);
  TensorState state;
  TensorStep last;

  void step(const LambGroupScalars& s, const std::vector<float>& g, bool average) {
    Piece piece;
    piece.count = p.size();
    KernelCase moments(KernelId::kLambMoments);
    moments.pieces = {piece};
    moments.set_args(SourceArgs{});
    auto& o = moments.named<kernels::LambMoments>();
    o.g = moments.list(std::vector<std::vector<float>>{g});
    o.m = moments.flat(m);
    const size_t m_at = o.m.at();
    o.v = moments.flat(v);
    const size_t v_at = o.v.at();
    o.p = moments.list(std::vector<std::vector<float>>{p});
    o.p_sums = moments.flat(std::vector<float>(1));
    const size_t sums_p = o.p_sums.at();
    o.u_sums = moments.flat(std::vector<float>(1));
    const size_t sums_u = o.u_sums.at();
    o.scalars = moments.flat(std::vector<LambGroupScalars>{s});
    o.u = moments.list(std::vector<std::vector<float>>{{0, 0}});
    const size_t u_at = o.u.at();
    const Outcome out = execute_reference(moments);
    m = out.as<float>(m_at);
    v = out.as<float>(v_at);

    KernelCase ratio(KernelId::kLambScalars);
    NormRange range;
    range.blocks = 1;
    TensorArgs args{};
    args.ranges = &range;
    args.n = 1;
    args.average = average;
    ratio.set_args(args);
    auto& r = ratio.named<kernels::LambScalars>();
    r.p_sums = ratio.flat(out.as<float>(sums_p));
    r.u_sums = ratio.flat(out.as<float>(sums_u));
    r.scalars = ratio.flat(std::vector<LambGroupScalars>{s});
    r.states = ratio.flat(std::vector<TensorState>{state});
    const size_t state_at = r.states.at();
    r.steps = ratio.flat(std::vector<TensorStep>(1));
    const size_t step_at = r.steps.at();
    EXPECT_EQ(compare_on_all_targets(ratio), "");
    const Outcome scaled = execute_reference(ratio);
    state = scaled.as<TensorState>(state_at)[0];
    last = scaled.as<TensorStep>(step_at)[0];

    KernelCase update(KernelId::kLambUpdate);
    update.pieces = {piece};
    auto& d = update.named<kernels::LambUpdate>();
    d.u = update.list(std::vector<std::vector<float>>{out.as<float>(u_at)});
    d.p = update.list(std::vector<std::vector<float>>{p});
    const size_t p_at = d.p.at();
    d.steps = update.flat(std::vector<TensorStep>{last});
    p = execute_reference(update).as<float>(p_at);
  }
};

// The direction may replace the gradient: the same numbers, and nothing else changes.
TEST(KernelsLamb, DirectionMayTakeTheGradientsPlace) {
  Random random(25);
  for (const Layout& layout : all_layouts()) {
    SCOPED_TRACE(layout.elements());
    MomentsCase moments(layout, lamb_groups(), &random, false, nullptr, nullptr);
    const Outcome apart = execute_reference(moments.work);
    moments.in_place();
    const Outcome together = execute_reference(moments.work);
    ASSERT_EQ(together.error, "");
    for (const size_t at : {moments.m_at, moments.v_at, moments.p_sums, moments.u_sums}) {
      EXPECT_EQ(apart.memory[at], together.memory[at]);
    }
    for (size_t t = 0; t < layout.sizes.size(); ++t) {
      EXPECT_EQ(apart.as<float>(t), moments.g[t]);  // gradients are the first memory of the case
      EXPECT_EQ(apart.memory[moments.u_at + t], together.memory[t]);
    }
  }
}

TEST(KernelsLamb, VectorsOfTheSpecification) {
  struct Expected {
    bool corrected, inside;
    double c1, p1a, p1b, c2, p2a, p2b;
  };
  const Expected table[] = {
      {false, false, 1.1197625, 2.6425519, 4.3496151, 1.1463667, 2.1854157, 4.5733309},
      {false, true, 1.1200883, 2.6426136, 4.3496785, 1.1467510, 2.1854930, 4.5734458},
      {true, false, 1.1197625, 2.8869650, 4.1105580, 1.1305947, 2.7808082, 4.1625414},
      {true, true, 1.1200883, 2.8869846, 4.1105781, 1.1309605, 2.7808325, 4.1625729}};
  for (const Expected& e : table) {
    Lamb lamb;
    lamb.p = {3, 4};
    LambGroupScalars s = lamb_scalars(0.1f, 0.01f);
    s.eps_inside_sqrt = e.inside;
    const auto rate = [&](int t) {
      return e.corrected ? 0.1 * std::sqrt(1 - std::pow(0.999, t)) / (1 - std::pow(0.9, t)) : 0.1;
    };
    const auto near = [](double found, double expected) {
      EXPECT_NEAR(found, expected, 2e-6 * expected + 2e-7);
    };
    s.lamb_lr = rate(1);
    lamb.step(s, {1, -2}, false);
    near(lamb.last.trust_ratio, e.c1);
    near(lamb.p[0], e.p1a);
    near(lamb.p[1], e.p1b);
    s.lamb_lr = rate(2);
    lamb.step(s, {0.5f, 0.5f}, false);
    near(lamb.last.trust_ratio, e.c2);
    near(lamb.p[0], e.p2a);
    near(lamb.p[1], e.p2b);
    near(lamb.m[0], 0.14);
    near(-lamb.m[1], 0.13);
    near(lamb.v[0], 0.001249);
    near(lamb.v[1], 0.004246);
    EXPECT_EQ(lamb.state.c_avg, 0.0);
  }
}

TEST(KernelsLamb, RatioIsBoundedAboveThenBelowAndAveraged) {
  const auto ratio_of = [](float wn2, float un2, double high, double low, TensorState* state) {
    KernelCase work(KernelId::kLambScalars);
    NormRange range;
    range.blocks = 1;
    TensorArgs args{};
    args.ranges = &range;
    args.n = 1;
    args.average = true;
    work.set_args(args);
    auto& o = work.named<kernels::LambScalars>();
    o.p_sums = work.flat(std::vector<float>{wn2});
    o.u_sums = work.flat(std::vector<float>{un2});
    LambGroupScalars s = lamb_scalars();
    s.max_coeff = high;
    s.min_coeff = low;
    s.coeff_beta = 0.9;
    s.lamb_lr = 0.5;
    o.scalars = work.flat(std::vector<LambGroupScalars>{s});
    o.states = work.flat(std::vector<TensorState>{*state});
    const size_t state_at = o.states.at();
    o.steps = work.flat(std::vector<TensorStep>(1));
    const size_t step_at = o.steps.at();
    const Outcome out = execute_reference(work);
    *state = out.as<TensorState>(state_at)[0];
    const TensorStep step = out.as<TensorStep>(step_at)[0];
    EXPECT_EQ(step.step_size, static_cast<float>(0.5 * step.trust_ratio));
    EXPECT_EQ(step.factor, 1.0);
    return step.trust_ratio;
  };
  TensorState state;
  EXPECT_EQ(ratio_of(16, 4, 10, 0.01, &state), 2.0);
  EXPECT_DOUBLE_EQ(state.c_avg, 0.2);
  EXPECT_EQ(ratio_of(16, 4, 1.5, 0.01, &state), 1.5);
  EXPECT_EQ(ratio_of(4, 16, 10, 0.7, &state), 0.7);
  EXPECT_EQ(ratio_of(16, 4, 0.1, 0.3, &state), 0.3);  // the lower bound has the last word
  const double average = state.c_avg;
  EXPECT_EQ(ratio_of(0, 4, 10, 0.01, &state), 1.0);
  EXPECT_EQ(ratio_of(4, 0, 10, 0.01, &state), 1.0);
  EXPECT_EQ(state.c_avg, average);  // a ratio of 1 is not averaged
}

TEST(KernelsNorms, SumSquaresEqualsTheReferenceAndTheSum) {
  Random random(24);
  for (const Layout& layout : all_layouts()) {
    for (const bool specials : {false, true}) {
      SCOPED_TRACE(layout.elements());
      std::vector<std::vector<float>> x = random.tensors(layout.sizes);
      if (specials) {
        for (auto& tensor : x) random.sprinkle(&tensor);
      }
      KernelCase work(KernelId::kSumSquares);
      work.pieces = layout.by_chunk;
      work.set_args(SourceArgs{});
      auto& o = work.named<kernels::SumSquares>();
      o.x = work.list(x);
      o.sums = work.flat(std::vector<float>(layout.chunk_blocks, -1.0f));
      const size_t sums = o.sums.at();
      EXPECT_EQ(compare_on_all_targets(work), "");
      EXPECT_EQ(compare_low_precision_sources<SourceArgs>(work), "");
      if (specials) continue;
      double expected = 0, found = 0;
      for (const auto& tensor : x) {
        for (const float v : tensor) expected += double{v} * v;
      }
      for (const float s : execute_reference(work).as<float>(sums)) found += s;
      EXPECT_NEAR(found, expected, 1e-5 * expected);
    }
  }
}

TEST(KernelsNorms, LanesAndFoldsAreInTheStatedOrder) {
  // Lane 0 gets 1, then 2^-24 64 and 128 elements later: each addition loses it. Added first they
  // would count.
  std::vector<float> x(193, 0.0f);
  x[0] = 1.0f;
  x[64] = x[128] = 0x1p-12f;
  KernelCase work(KernelId::kSumSquares);
  Piece piece;
  piece.count = x.size();
  work.pieces = {piece};
  work.set_args(SourceArgs{});
  auto& o = work.named<kernels::SumSquares>();
  o.x = work.list(std::vector<std::vector<float>>{x});
  o.sums = work.flat(std::vector<float>(1));
  const size_t sums = o.sums.at();
  EXPECT_EQ(compare_on_all_targets(work), "");
  EXPECT_EQ(execute_reference(work).as<float>(sums)[0], 1.0f);
  // In lanes 1 and 33 they meet in the first fold and then count.
  x.assign(193, 0.0f);
  x[0] = 1.0f;
  x[1] = x[33] = 0x1p-12f;
  work.memory[0].bytes.assign(reinterpret_cast<uint8_t*>(x.data()),
                              reinterpret_cast<uint8_t*>(x.data() + x.size()));
  EXPECT_EQ(compare_on_all_targets(work), "");
  EXPECT_EQ(execute_reference(work).as<float>(sums)[0], 1.0f + 0x1p-23f);
}

struct Clip {
  float coefficient;
  double norm;
  uint32_t word;
};

Clip clip_of(const std::vector<std::vector<float>>& block_sums, double clip, uint32_t flags = 0,
             std::optional<uint32_t> prior = std::nullopt) {
  std::vector<uint8_t> messages;
  for (const std::vector<float>& sums : block_sums) {
    KernelCase work(KernelId::kNormMessage);
    work.set_args(BlocksArgs{sums.size()});
    auto& o = work.named<kernels::NormMessage>();
    o.sums = work.flat(sums);
    o.flags = work.flat(std::vector<uint32_t>{flags});
    o.message = work.flat(std::vector<uint8_t>(16, 0xff));
    const size_t message = o.message.at();
    EXPECT_EQ(compare_on_all_targets(work), "");
    const std::vector<uint8_t> bytes = execute_reference(work).memory[message];
    messages.insert(messages.end(), bytes.begin(), bytes.end());
  }
  KernelCase work(KernelId::kClipCoefficient);
  ClipArgs args{};
  args.clip = clip;
  args.world = static_cast<uint32_t>(block_sums.size());
  args.fail_word = kSkipNonfinite;
  work.set_args(args);
  auto& o = work.named<kernels::ClipCoefficient>();
  o.messages = work.flat(messages);
  o.coefficient = work.flat(std::vector<float>(1));
  const size_t coefficient = o.coefficient.at();
  o.norm = work.flat(std::vector<double>(1));
  const size_t norm = o.norm.at();
  o.word = work.flat(std::vector<uint32_t>(1));
  const size_t word = o.word.at();
  if (prior) o.prior = work.flat(std::vector<uint32_t>{*prior});
  EXPECT_EQ(compare_on_all_targets(work), "");
  const Outcome out = execute_reference(work);
  return {out.as<float>(coefficient)[0], out.as<double>(norm)[0], out.as<uint32_t>(word)[0]};
}

TEST(KernelsNorms, ClipCoefficientIsCommon) {
  const Clip clipped = clip_of({{9, 16}, {25}, {100}}, 2.0);  // norms 5, 5, 10
  EXPECT_DOUBLE_EQ(clipped.norm, 20.0 / 3);
  EXPECT_EQ(clipped.coefficient, static_cast<float>(2.0 / (20.0 / 3 + 1e-6)));
  EXPECT_EQ(clipped.word, kCommit);
  EXPECT_EQ(clip_of({{9, 16}}, 6.0).coefficient, 1.0f);
  EXPECT_EQ(clip_of({{9, 16}}, 0.0).coefficient, 1.0f);
  EXPECT_EQ(clip_of({{9}}, 1.0, kFlagNonfinite).word, kSkipNonfinite);
  EXPECT_EQ(clip_of({{9}, {std::numeric_limits<float>::infinity()}}, 1.0).word, kSkipNonfinite);
  EXPECT_EQ(clip_of({{std::numeric_limits<float>::quiet_NaN()}}, 1.0).word, kSkipNonfinite);
  // An earlier decision stands.
  EXPECT_EQ(clip_of({{9}}, 1.0, 0, kCommit).word, kCommit);
  EXPECT_EQ(clip_of({{9}}, 1.0, kFlagNonfinite, kCommit).word, kSkipNonfinite);
  EXPECT_EQ(clip_of({{9}}, 1.0, kFlagNonfinite, kSkipServer).word, kSkipServer);
}

}  // namespace
}  // namespace sotto::test
