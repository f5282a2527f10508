// 1-bit LAMB: encoder, switch, both passes of the compressed step.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/base/bits.h"
#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

OnebitLambGroupScalars scalars(float wd) {
  OnebitLambGroupScalars s;
  s.lr = 0.01;
  s.factor_max = 4;
  s.factor_min = 0.5;
  s.factor_threshold = 0.1;
  s.b1 = 0.9f;
  s.one_minus_b1 = static_cast<float>(1 - 0.9);
  s.b2 = 0.999f;
  s.one_minus_b2 = static_cast<float>(1 - 0.999);
  s.eps = 1e-6f;
  s.weight_decay = wd;
  return s;
}

// What all kernels of the compressed stage share.
struct Stage {
  Stage(const Layout& l, Random* random, bool specials, bool masks) : layout(l), use_masks(masks) {
    groups = {scalars(0.0f), scalars(0.01f), scalars(0.1f)};
    g = random->tensors(layout.sizes);
    p = random->tensors(layout.sizes);
    m = random->normal(layout.padded, 0.1f);
    old_m = random->normal(layout.padded, 0.1f);
    c = random->normal(layout.padded, 0.1f);
    vf = random->positive(layout.padded, 0.01f, 1e-8f);
    den = random->positive(layout.padded, 0.1f, 1e-6f);
    if (specials) {
      for (auto& tensor : g) random->sprinkle(&tensor);
      for (auto& tensor : p) random->sprinkle(&tensor);
      for (auto* v : {&m, &old_m, &c, &vf, &den}) random->sprinkle(v);
    }
    bits = random->bytes(layout.padded / 8 + 1);
    old_bits = random->bytes(layout.padded / 8 + 1);
    valid = random->mask(layout.padded);
    states.resize(layout.sizes.size());
    for (size_t t = 0; t < states.size(); ++t) {
      states[t].scaling_coeff = 0.7 + 0.1 * static_cast<double>(t);
      states[t].c_avg = 0.2 + 0.05 * static_cast<double>(t);
    }
    for (uint64_t r = 0; r < layout.world; ++r) {
      scales.push_back(random->positive(1, 0.1f, 0.05f));
      old_scales.push_back(random->positive(1, 0.1f, 0.05f));
    }
  }
  // As bits and messages, or as floats.
  kernels::MomentumOperands<OperandMemory> momentum_of(KernelCase* work, bool as_bits,
                                                       bool old) const {
    if (!as_bits) return {.floats = work->flat(old ? old_m : m)};
    return {.bits = work->flat(old ? old_bits : bits),
            .messages = work->flat(make_messages(old ? old_scales : scales))};
  }
  OperandMemory valid_of(KernelCase* work) const {
    return use_masks ? work->flat(valid) : OperandMemory();
  }
  bool masked(uint64_t flat) const { return use_masks && !get_bit(valid.data(), flat); }
  double momentum(uint64_t flat, size_t t, bool as_bits, bool old) const {
    if (!as_bits) return (old ? old_m : m)[flat];
    const double magnitude =
        (old ? old_scales : scales)[flat / layout.chunk][0] / states[t].scaling_coeff;
    return get_bit((old ? old_bits : bits).data(), flat) ? magnitude : -magnitude;
  }

  Layout layout;
  bool use_masks;
  std::vector<GroupScalars> groups;
  std::vector<std::vector<float>> g, p;
  std::vector<float> m, old_m, c, vf, den;
  std::vector<uint8_t> bits, old_bits, valid;
  std::vector<TensorState> states;
  std::vector<std::vector<float>> scales, old_scales;  // per chunk
};

struct EncodeCase {
  EncodeCase(const Stage& s, bool as_bits, ScaleKind kind, bool identity, const float* clip)
      : work(KernelId::kOnebitLambEncode) {
    work.pieces = s.layout.by_chunk;
    EncodeArgs args{};
    args.scale = kind;
    args.identity = identity;
    work.set_args(args);
    auto& o = work.named<kernels::OnebitLambEncode>();
    o.g = work.list(s.g);
    o.m = s.momentum_of(&work, as_bits, false);
    o.to.c = work.flat(s.c);
    if (!identity) {
      o.to.old_scales = work.flat(std::vector<float>{0.08f});
      o.to.bits = work.flat(std::vector<uint8_t>(s.layout.padded / 8));
      o.to.sums = work.flat(std::vector<float>(s.layout.chunk_blocks, -1.0f));
    }
    o.to.valid = s.valid_of(&work);
    o.to.flags = work.flat(std::vector<uint32_t>{0});
    o.scalars = work.flat(s.groups);
    o.states = work.flat(s.states);
    if (clip != nullptr) o.clip = work.flat(std::vector<float>{*clip});
    c_at = o.to.c.at();
  }
  KernelCase work;
  size_t c_at = 0;
};

TEST(KernelsOnebitLamb, EncoderEqualsTheReferenceOnEveryTarget) {
  Random random(30);
  const float clip = 0.8f;
  for (const Layout& layout : all_layouts()) {
    for (const int variant : {0, 1, 2, 3, 4, 5, 6, 7}) {
      SCOPED_TRACE(std::to_string(layout.elements()) + " variant " + std::to_string(variant));
      const Stage stage(layout, &random, variant & 1, variant & 2);
      const ScaleKind kind = variant & 1 ? ScaleKind::kL1 : ScaleKind::kL2;
      EncodeCase encode(stage, variant & 4, kind, false, variant & 2 ? &clip : nullptr);
      EXPECT_EQ(compare_on_all_targets(encode.work), "");
      EXPECT_EQ(compare_low_precision_sources<EncodeArgs>(encode.work), "");
      encode.work.id = KernelId::kOnebitLambEncodeUndo;
      encode.work.paired_ran = variant & 1;
      EXPECT_EQ(compare_on_all_targets(encode.work), "");
      EXPECT_EQ(compare_low_precision_sources<EncodeArgs>(encode.work), "");
      const EncodeCase identity(stage, false, kind, true, &clip);
      EXPECT_EQ(compare_on_all_targets(identity.work), "");
      EXPECT_EQ(compare_low_precision_sources<EncodeArgs>(identity.work), "");
    }
  }
}

TEST(KernelsOnebitLamb, EncoderFollowsTheFormulas) {
  Random random(31);
  const float clip = 0.8f;
  for (const bool as_bits : {false, true}) {
    const Stage s(make_layout({7, 0, 65, 1, 8193, 30000}, 2, 512, 3), &random, false, true);
    EncodeCase encode(s, as_bits, ScaleKind::kL2, false, &clip);
    EncodeCase identity(s, as_bits, ScaleKind::kL2, true, &clip);
    const std::vector<float> c = execute_reference(encode.work).as<float>(encode.c_at);
    const std::vector<float> m = execute_reference(identity.work).as<float>(identity.c_at);
    for (size_t t = 0; t < s.g.size(); ++t) {
      for (uint64_t i = 0; i < s.g[t].size(); ++i) {
        const uint64_t flat = s.layout.starts[t] + i;
        const double ema = 0.9 * s.momentum(flat, t, as_bits, false) + 0.1 * (s.g[t][i] * 0.8);
        const double e = s.c[flat] - (s.c[flat] >= 0 ? 0.08 : -0.08);
        ASSERT_NEAR(c[flat], s.masked(flat) ? 0.0 : ema * s.states[t].scaling_coeff + e, 1e-6);
        ASSERT_NEAR(m[flat], s.masked(flat) ? 0.0 : ema, 1e-6);
      }
    }
  }
}

// Both encoders agree: the undo of this one gives the residual of the encoder back.
TEST(KernelsOnebitLamb, UndoTakesTheEncodingBack) {
  Random random(32);
  Stage s(make_layout({8193}, 1, 512), &random, false, false);
  EncodeCase encode(s, false, ScaleKind::kL2, false, nullptr);
  const std::vector<float> before = s.c;
  s.c = execute_reference(encode.work).as<float>(encode.c_at);
  EncodeCase undo(s, false, ScaleKind::kL2, false, nullptr);
  undo.work.id = KernelId::kOnebitLambEncodeUndo;
  undo.work.paired_ran = true;
  const std::vector<float> back = execute_reference(undo.work).as<float>(undo.c_at);
  for (size_t i = 0; i < 8193; ++i) {
    const double e = before[i] - (before[i] >= 0 ? 0.08f : -0.08f);
    ASSERT_NEAR(back[i], e, std::fabs(s.c[i]) * 0x1p-23 + 1e-9);
  }
}

struct FactorCase {
  FactorCase(const Stage& s, bool new_bits, bool old_bits) : work(KernelId::kOnebitLambFactor) {
    work.pieces = s.layout.by_tensor;
    auto& o = work.named<kernels::OnebitLambFactor>();
    o.m = s.momentum_of(&work, new_bits, false);
    o.old = s.momentum_of(&work, old_bits, true);
    o.vf = work.flat(s.vf);
    o.den = work.flat(s.den);
    o.p = work.list(s.p);
    o.valid = s.valid_of(&work);
    o.u0_sums = work.flat(std::vector<float>(s.layout.tensor_blocks, -1.0f));
    o.u_sums = work.flat(std::vector<float>(s.layout.tensor_blocks, -1.0f));
    o.maxima = work.flat(std::vector<float>(s.layout.tensor_blocks, -1.0f));
    o.scalars = work.flat(s.groups);
    o.states = work.flat(s.states);
    vf_at = o.vf.at();
    u0_at = o.u0_sums.at();
    u_at = o.u_sums.at();
    max_at = o.maxima.at();
  }
  KernelCase work;
  size_t vf_at = 0, u0_at = 0, u_at = 0, max_at = 0;
};

TEST(KernelsOnebitLamb, FactorEqualsTheReferenceOnEveryTarget) {
  Random random(33);
  for (const Layout& layout : all_layouts()) {
    for (int variant = 0; variant < 16; ++variant) {
      SCOPED_TRACE(std::to_string(layout.elements()) + " variant " + std::to_string(variant));
      Stage stage(layout, &random, variant & 1, variant & 2);
      for (Piece& p : stage.layout.by_tensor)
        p.group = (p.tensor + static_cast<uint32_t>(variant)) % 3;
      EXPECT_EQ(compare_on_all_targets(FactorCase(stage, variant & 4, variant & 8).work), "");
    }
  }
}

TEST(KernelsOnebitLamb, FactorFollowsTheFormulas) {
  Random random(34);
  for (const int sources : {0, 1, 2, 3}) {
    const bool new_bits = sources & 1, old_bits = sources & 2;
    const Stage s(make_layout({7, 0, 65, 1, 8193, 30000}, 2, 512, 3), &random, false, true);
    FactorCase factor(s, new_bits, old_bits);
    const Outcome out = execute_reference(factor.work);
    const std::vector<float> vf = out.as<float>(factor.vf_at), u0s = out.as<float>(factor.u0_at),
                             us = out.as<float>(factor.u_at), maxima = out.as<float>(factor.max_at);
    for (size_t t = 0; t < s.g.size(); ++t) {
      const double wd = s.groups[t % 3].weight_decay;
      double u0_norm = 0, u_norm = 0, best = 0, u0_found = 0, u_found = 0, best_found = 0;
      for (uint64_t i = 0; i < s.g[t].size(); ++i) {
        const uint64_t flat = s.layout.starts[t] + i;
        double u0 = 0;
        if (s.masked(flat)) {
          ASSERT_EQ(vf[flat], s.vf[flat]);
        } else {
          const double m = s.momentum(flat, t, new_bits, false);
          const double gr = (m - 0.9 * s.momentum(flat, t, old_bits, true)) / 0.1;
          const double expected = 0.999 * s.vf[flat] + 0.001 * gr * gr;
          ASSERT_NEAR(vf[flat], expected, 1e-5 * expected + 1e-10);
          best = std::max(best, s.den[flat] / (std::sqrt(expected) + 1e-6));
          u0 = m / s.den[flat];
        }
        const double u = u0 + wd * s.p[t][i];
        u0_norm += u0 * u0;
        u_norm += u * u;
      }
      const NormRange& range = s.layout.tensor_ranges[t];
      for (uint64_t b = range.first_block; b < range.first_block + range.blocks; ++b) {
        u0_found += u0s[b];
        u_found += us[b];
        best_found = std::max(best_found, double{maxima[b]});
      }
      if (wd == 0) u0_norm = u_norm = 0;
      EXPECT_NEAR(u0_found, u0_norm, 1e-4 * u0_norm);
      EXPECT_NEAR(u_found, u_norm, 1e-4 * u_norm);
      EXPECT_NEAR(best_found, best, 1e-4 * best);
    }
  }
}

// Ratios that differ by a few units in the last place, at all magnitudes of the variance: the
// largest has to be found exactly, however a target looks for it.
TEST(KernelsOnebitLamb, FactorFindsTheLargestOfNearTies) {
  Random random(38);
  const Layout layout = make_layout({100003}, 1, 512);
  for (const float ratio : {1e-3f, 0.97f, 1.0f, 1234.5f}) {
    for (const float eps : {0.0f, 1e-8f, 1e-2f}) {
      SCOPED_TRACE(std::to_string(ratio) + " eps " + std::to_string(eps));
      Stage s(layout, &random, false, false);
      for (GroupScalars& g : s.groups) g.eps = eps, g.b2 = 1.0f, g.one_minus_b2 = 0.0f;  // vf stays
      for (uint64_t i = 0; i < layout.padded; ++i) {
        s.vf[i] = std::ldexp(1.0f + s.vf[i], static_cast<int>(random.below(200)) - 140);
        s.den[i] = ratio * (std::sqrt(s.vf[i]) + eps);
        for (uint32_t step = random.below(4); step != 0; --step)
          s.den[i] = std::nextafter(s.den[i], 1e30f);
      }
      FactorCase factor(s, true, true);
      EXPECT_EQ(compare_on_all_targets(factor.work), "");
      float best = 0;
      for (uint64_t i = 0; i < layout.elements(); ++i)
        best = std::max(best, s.den[i] / (std::sqrt(s.vf[i]) + eps));
      const std::vector<float> maxima = execute_reference(factor.work).as<float>(factor.max_at);
      EXPECT_EQ(*std::max_element(maxima.begin(), maxima.end()), best);
    }
  }
}

TEST(KernelsOnebitLamb, UpdateAndExpansionEqualTheReferenceOnEveryTarget) {
  Random random(35);
  for (const Layout& layout : all_layouts()) {
    for (const int variant : {0, 1, 2, 3, 4, 5, 6, 7}) {
      SCOPED_TRACE(std::to_string(layout.elements()) + " variant " + std::to_string(variant));
      Stage stage(layout, &random, variant & 1, variant & 2);
      for (Piece& p : stage.layout.by_tensor)
        p.group = (p.tensor + static_cast<uint32_t>(variant)) % 3;
      std::vector<TensorStep> steps(layout.sizes.size());
      for (size_t t = 0; t < steps.size(); ++t)
        steps[t].step_size = 0.01f * static_cast<float>(t + 1);
      KernelCase update(KernelId::kMomentumUpdate);
      update.pieces = stage.layout.by_tensor;
      auto& u = update.named<kernels::MomentumUpdate>();
      u.m = stage.momentum_of(&update, variant & 4, false);
      u.den = update.flat(stage.den);
      u.p = update.list(stage.p);
      u.valid = stage.valid_of(&update);
      u.scalars = update.flat(stage.groups);
      u.steps = update.flat(steps);
      u.states = update.flat(stage.states);
      EXPECT_EQ(compare_on_all_targets(update), "");

      KernelCase expand(KernelId::kMomentumFromBits);
      expand.pieces = layout.by_tensor;
      auto& e = expand.named<kernels::MomentumFromBits>();
      e.bits = expand.flat(stage.bits);
      e.messages = expand.flat(make_messages(stage.scales));
      e.states = expand.flat(stage.states);
      e.m = expand.flat(std::vector<float>(layout.padded, 9.0f));
      e.valid = stage.valid_of(&expand);
      EXPECT_EQ(compare_on_all_targets(expand), "");
      if (variant & 1) continue;
      const Outcome updated = execute_reference(update);
      const std::vector<float> m = execute_reference(expand).as<float>(e.m.at());
      for (size_t t = 0; t < stage.p.size(); ++t) {
        const std::vector<float> p = updated.as<float>(u.p.at() + t);
        const double wd = stage.groups[(t + static_cast<uint32_t>(variant)) % 3].weight_decay;
        for (uint64_t i = 0; i < p.size(); ++i) {
          const uint64_t flat = layout.starts[t] + i;
          const double bit_m = stage.momentum(flat, t, true, false);
          ASSERT_NEAR(m[flat], stage.masked(flat) ? 0.0 : bit_m, 1e-6);
          double direction =
              stage.masked(flat) ? 0.0 : (variant & 4 ? bit_m : stage.m[flat]) / stage.den[flat];
          direction += wd * stage.p[t][i];
          ASSERT_NEAR(p[i], stage.p[t][i] - double{steps[t].step_size} * direction,
                      1e-6 + 1e-6 * std::fabs(direction));
        }
      }
    }
  }
}

TEST(KernelsOnebitLamb, PrepareFreezesAndMasks) {
  Random random(36);
  for (const Layout& layout : all_layouts()) {
    for (const int variant : {0, 1, 2, 3}) {
      SCOPED_TRACE(std::to_string(layout.elements()) + " variant " + std::to_string(variant));
      Stage s(layout, &random, variant & 1, true);
      std::vector<float> v = s.vf;
      // Few zeros, so that some groups have none; a zero and a minus zero are both no variance.
      for (uint64_t i = 0; i < v.size(); ++i) {
        if (random.below(200) == 0) v[i] = random.below(2) == 0 ? 0.0f : -0.0f;
      }
      KernelCase work(KernelId::kFreezeVariance);
      work.pieces = layout.by_tensor;
      work.set_args(FreezeArgs{(variant & 2) != 0});
      auto& o = work.named<kernels::FreezeVariance>();
      o.m = work.flat(s.m);
      o.v = work.flat(v);
      o.vf = work.flat(std::vector<float>(layout.padded, 5.0f));
      const size_t vf_at = o.vf.at();
      o.den = work.flat(std::vector<float>(layout.padded, 5.0f));
      const size_t den_at = o.den.at();
      o.valid = work.flat(s.valid);
      const size_t valid_at = o.valid.at();
      o.sums = work.flat(std::vector<float>(layout.tensor_blocks, -1.0f));
      const size_t sums_at = o.sums.at();
      o.scalars = work.flat(s.groups);
      EXPECT_EQ(compare_on_all_targets(work), "");
      if (variant & 1) continue;
      const Outcome out = execute_reference(work);
      const std::vector<float> vf = out.as<float>(vf_at), den = out.as<float>(den_at),
                               sums = out.as<float>(sums_at);
      double expected = 0, found = 0;
      for (const float sum : sums) found += sum;
      for (uint64_t i = 0; i < layout.elements(); ++i) {
        const bool keep = get_bit(s.valid.data(), i) && !(variant & 2 && v[i] == 0);
        ASSERT_EQ(get_bit(out.memory[valid_at].data(), i), keep);
        ASSERT_EQ(vf[i], v[i]);
        ASSERT_NEAR(den[i], std::sqrt(double{v[i]}) + 1e-6, 1e-7);
        if (keep) expected += double{s.m[i]} * s.m[i];
      }
      EXPECT_NEAR(found, expected, 1e-5 * expected);
    }
  }
}

TEST(KernelsOnebitLamb, CountsOfValidElements) {
  Random random(37);
  for (const Layout& layout : all_layouts()) {
    const std::vector<uint8_t> valid = random.mask(layout.padded);
    for (const bool masks : {false, true}) {
      KernelCase work(KernelId::kCountValid);
      work.pieces = layout.by_tensor;
      for (Piece& p : work.pieces) p.block = p.tensor, p.lane = 0;
      auto& o = work.named<kernels::CountValid>();
      if (masks) o.valid = work.flat(valid);
      o.counts = work.flat(std::vector<uint64_t>(layout.sizes.size(), 0));
      const size_t at = o.counts.at();
      EXPECT_EQ(compare_on_all_targets(work), "");
      const std::vector<uint64_t> counts = execute_reference(work).as<uint64_t>(at);
      for (size_t t = 0; t < counts.size(); ++t) {
        uint64_t expected = 0;
        for (uint64_t i = 0; i < layout.sizes[t]; ++i) {
          expected += !masks || get_bit(valid.data(), layout.starts[t] + i);
        }
        EXPECT_EQ(counts[t], expected);
      }
    }
  }
}

TEST(KernelsOnebitLamb, ScalingUnitesTheTensors) {
  // RMS 2, 4, zero momentum, nothing valid.
  std::vector<NormRange> ranges(4);
  for (uint32_t t = 0; t < 4; ++t)
    ranges[t].first_block = ranges[t].tensor = t, ranges[t].blocks = 1;
  KernelCase work(KernelId::kOnebitLambScaling);
  ScalingArgs args{};
  args.ranges = ranges.data();
  args.n = 4;
  args.debias = 0.5;
  work.set_args(args);
  auto& o = work.named<kernels::OnebitLambScaling>();
  o.sums = work.flat(std::vector<float>{400, 1600, 0, 0});
  o.counts = work.flat(std::vector<uint64_t>{100, 100, 100, 0});
  TensorState before;
  before.c_avg = 0.25;
  before.last_factor = 3;
  o.states = work.flat(std::vector<TensorState>(4, before));
  const size_t at = o.states.at();
  EXPECT_EQ(compare_on_all_targets(work), "");
  const std::vector<TensorState> states = execute_reference(work).as<TensorState>(at);
  EXPECT_DOUBLE_EQ(states[0].scaling_coeff, 1.5);
  EXPECT_DOUBLE_EQ(states[1].scaling_coeff, 0.75);
  EXPECT_EQ(states[2].scaling_coeff, 1.0);
  EXPECT_EQ(states[3].scaling_coeff, 1.0);
  for (const TensorState& state : states) {
    EXPECT_EQ(state.last_factor, 1.0);
    EXPECT_EQ(state.c_avg, 0.5);
  }
}

struct FactorResult {
  TensorState state;
  TensorStep step;
};

FactorResult bounded(float u0, float u, float maximum, float wd, double last) {
  KernelCase work(KernelId::kOnebitLambScalars);
  NormRange range;
  range.blocks = 2;
  TensorArgs args{};
  args.ranges = &range;
  args.n = 1;
  work.set_args(args);
  auto& o = work.named<kernels::OnebitLambScalars>();
  o.u0_sums = work.flat(std::vector<float>{u0, 0});
  o.u_sums = work.flat(std::vector<float>{u, 0});
  o.maxima = work.flat(std::vector<float>{0, maximum});
  o.scalars = work.flat(std::vector<OnebitLambGroupScalars>{scalars(wd)});
  TensorState state;
  state.c_avg = 0.25;
  state.last_factor = last;
  o.states = work.flat(std::vector<TensorState>{state});
  const size_t state_at = o.states.at();
  o.steps = work.flat(std::vector<TensorStep>(1));
  const size_t step_at = o.steps.at();
  EXPECT_EQ(compare_on_all_targets(work), "");
  const Outcome out = execute_reference(work);
  const FactorResult r{out.as<TensorState>(state_at)[0], out.as<TensorStep>(step_at)[0]};
  EXPECT_EQ(r.step.factor, r.state.last_factor);
  EXPECT_EQ(r.step.trust_ratio, 0.25 * r.step.factor);
  EXPECT_EQ(r.step.step_size, static_cast<float>(0.01 * (0.25 * r.step.factor)));
  return r;
}

// A call has the tensors of a group, of any number of blocks each.
TEST(KernelsOnebitLamb, ScalarsOfManyTensorsEqualTheReferenceOnEveryTarget) {
  Random random(31);
  std::vector<NormRange> ranges;
  uint64_t blocks = 0;
  for (const uint64_t n : {1, 2, 33, 1024, 1025, 3000, 1, 5, 1, 7, 1, 64, 1, 3, 1, 1, 2}) {
    const auto t = static_cast<uint32_t>(ranges.size());
    ranges.push_back({blocks, n, n * kNormBlock, t % 3, t});
    blocks += n;
  }
  std::vector<TensorState> states(ranges.size());
  for (size_t t = 0; t < states.size(); ++t)
    states[t] = {0.1 * static_cast<double>(t), 0.6 + 0.2 * static_cast<double>(t), 1};
  KernelCase work(KernelId::kOnebitLambScalars);
  work.set_args(TensorArgs{ranges.data(), ranges.size(), false});
  auto& o = work.named<kernels::OnebitLambScalars>();
  o.u0_sums = work.flat(random.positive(blocks, 1, 0));
  o.u_sums = work.flat(random.positive(blocks, 1, 0));
  o.maxima = work.flat(random.positive(blocks, 0.5f, 0));
  o.scalars = work.flat(std::vector{scalars(0.0f), scalars(0.01f), scalars(0.1f)});
  o.states = work.flat(states);
  o.steps = work.flat(std::vector<TensorStep>(ranges.size()));
  EXPECT_EQ(compare_on_all_targets(work), "");
}

TEST(KernelsOnebitLamb, FactorIsBoundedInTheStatedOrder) {
  EXPECT_DOUBLE_EQ(bounded(0, 0, 1.05f, 0, 1).step.factor, double{1.05f});
  EXPECT_DOUBLE_EQ(bounded(0, 0, 3.0f, 0, 1).step.factor, 1.1);     // per-step bound above
  EXPECT_DOUBLE_EQ(bounded(0, 0, 0.1f, 0, 1).step.factor, 0.9);     // per-step bound below
  EXPECT_DOUBLE_EQ(bounded(0, 0, 9.0f, 0, 3.9).step.factor, 4.0);   // absolute bound above
  EXPECT_DOUBLE_EQ(bounded(0, 0, 0.1f, 0, 0.52).step.factor, 0.5);  // absolute bound below
  EXPECT_DOUBLE_EQ(bounded(0, 0, 9.0f, 0, 0.2).step.factor,
                   0.2 * 1.1);  // the per-step bounds have the last word
  // q = 3/6: factor = 1.1*q + (1-q), in double.
  EXPECT_NEAR(bounded(9, 36, 1.1f, 0.1f, 1).step.factor, 1.05, 1e-7);
  EXPECT_NEAR(bounded(36, 9, 1.05f, 0.1f, 1).step.factor, 1.05, 1e-7);  // q is at most 1
  EXPECT_NEAR(bounded(9, 0, 1.05f, 0.1f, 1).step.factor, 1.05, 1e-7);   // no norm: q = 1
  EXPECT_EQ(bounded(0, 0, 0.0f, 0.1f, 1.7).step.factor, 1.7);           // no valid element
}

}  // namespace
}  // namespace sotto::test
