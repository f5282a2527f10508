// Kernels of 0/1 Adam, SGD and Lion.
#include <gtest/gtest.h>

#include <cmath>

#include "core/base/bits.h"
#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

ZeroOneGroupScalars scalars(float wd) {
  ZeroOneGroupScalars s;
  s.lr = 0.02;
  s.b1 = 0.9f;
  s.one_minus_b1 = static_cast<float>(1 - 0.9);
  s.b2 = 0.99f;
  s.one_minus_b2 = static_cast<float>(1 - 0.99);
  s.eps = 1e-6f;
  s.weight_decay = wd;
  s.lr_sum = 0.06f;
  s.decay = 0.998f;
  return s;
}

// Memory that the kernels share.
struct State {
  State(const Layout& l, Random* random, bool specials, bool masks) : layout(l), use_masks(masks) {
    groups = {scalars(0.0f), scalars(0.01f), scalars(0.1f)};
    groups[1].lr_sum = 0;
    g = random->tensors(layout.sizes);
    p = random->tensors(layout.sizes);
    m = random->normal(layout.padded, 0.1f);
    b = random->normal(layout.padded, 0.1f);
    c = random->normal(layout.padded, 0.1f);
    v = random->positive(layout.padded, 0.01f, 1e-8f);
    den = random->positive(layout.padded, 0.1f, 1e-4f);
    anchor = random->normal(layout.padded);
    if (specials) {
      for (auto& tensor : g) random->sprinkle(&tensor);
      for (auto* values : {&m, &b, &c, &v, &den, &anchor}) random->sprinkle(values);
    }
    bits = random->bytes(layout.padded / 8 + 1);
    valid = random->mask(layout.padded);
    for (uint64_t r = 0; r < layout.world; ++r) scales.push_back(random->positive(1, 0.1f, 0.05f));
  }
  bool masked(uint64_t flat) const { return use_masks && !get_bit(valid.data(), flat); }
  double from_bits(uint64_t flat) const {
    const float magnitude = scales[flat / layout.chunk][0];
    return get_bit(bits.data(), flat) ? magnitude : -magnitude;
  }
  const ZeroOneGroupScalars& group(size_t tensor) const { return groups[tensor % groups.size()]; }

  Layout layout;
  bool use_masks;
  std::vector<ZeroOneGroupScalars> groups;
  std::vector<std::vector<float>> g, p;
  std::vector<float> m, b, c, v, den, anchor;
  std::vector<uint8_t> bits, valid;
  std::vector<std::vector<float>> scales;
};

// A kernel call on it.
struct Call {
  Call(KernelId id, const State& state, bool by_chunk) : s(state), work(id) {
    work.pieces = by_chunk ? s.layout.by_chunk : s.layout.by_tensor;
  }
  OperandMemory bits() { return work.flat(s.bits); }
  OperandMemory messages() { return work.flat(make_messages(s.scales)); }
  OperandMemory valid() { return s.use_masks ? work.flat(s.valid) : OperandMemory(); }
  OperandMemory coefficient(const float* value) {
    return value != nullptr ? work.flat(std::vector<float>{*value}) : OperandMemory();
  }
  const State& s;
  KernelCase work;
  size_t m_at = 0, b_at = 0, p_at = 0, c_at = 0;
};

Call frozen_adam(const State& s, bool as_bits, const float* clip) {
  Call call(KernelId::kFrozenAdam, s, false);
  KernelCase& work = call.work;
  work.set_args(SourceArgs{});
  auto& o = work.named<kernels::FrozenAdam>();
  if (as_bits) {
    o.bits = call.bits();
    o.messages = call.messages();
  } else {
    o.g = work.list(s.g);
  }
  o.m = work.flat(s.m);
  o.v = work.flat(s.v);
  o.p = work.list(s.p);
  o.scalars = work.flat(s.groups);
  o.clip = call.coefficient(clip);
  o.valid = call.valid();
  call.m_at = o.m.at();
  call.p_at = o.p.at();
  return call;
}

Call zeroone_local(const State& s, const float* clip) {
  Call call(KernelId::kZeroOneLocal, s, false);
  KernelCase& work = call.work;
  work.set_args(SourceArgs{});
  auto& o = work.named<kernels::ZeroOneLocal>();
  o.g = work.list(s.g);
  o.m = work.flat(s.m);
  o.b = work.flat(s.b);
  o.den = work.flat(s.den);
  o.anchor = work.flat(s.anchor);
  o.p = work.list(s.p);
  o.scalars = work.flat(s.groups);
  o.clip = call.coefficient(clip);
  o.valid = call.valid();
  call.p_at = o.p.at();
  return call;
}

Call zeroone_encode(const State& s, ScaleKind kind, bool identity, bool gradients,
                    const float* clip) {
  Call call(KernelId::kZeroOneEncode, s, true);
  KernelCase& work = call.work;
  EncodeArgs args{};
  args.scale = kind;
  args.identity = identity;
  work.set_args(args);
  auto& o = work.named<kernels::ZeroOneEncode>();
  if (gradients) o.g = work.list(s.g);
  o.m = work.flat(s.m);
  o.b = work.flat(s.b);
  o.to.c = work.flat(s.c);
  if (!identity) {
    o.to.old_scales = work.flat(std::vector<float>{0.08f});
    o.to.bits = work.flat(std::vector<uint8_t>(s.layout.padded / 8));
    o.to.sums = work.flat(std::vector<float>(s.layout.chunk_blocks, -1.0f));
  }
  o.to.valid = call.valid();
  o.to.flags = work.flat(std::vector<uint32_t>{0});
  o.scalars = work.flat(s.groups);
  o.clip = call.coefficient(clip);
  call.c_at = o.to.c.at();
  return call;
}

Call zeroone_sync(const State& s, bool as_bits) {
  Call call(KernelId::kZeroOneSync, s, false);
  KernelCase& work = call.work;
  auto& o = work.named<kernels::ZeroOneSync>();
  if (as_bits) {
    o.x.bits = call.bits();
    o.x.messages = call.messages();
  } else {
    o.x.floats = work.flat(s.c);
  }
  o.m = work.flat(s.m);
  o.b = work.flat(s.b);
  o.den = work.flat(s.den);
  o.anchor = work.flat(s.anchor);
  o.p = work.list(s.p);
  o.scalars = work.flat(s.groups);
  o.valid = call.valid();
  call.m_at = o.m.at();
  call.b_at = o.b.at();
  call.p_at = o.p.at();
  return call;
}

// The operands that the kernels of mode compat share.
void bind_in_place(Call* call, kernels::InPlaceOperands<OperandMemory>* o, bool gradients,
                   const float* clip) {
  KernelCase& work = call->work;
  const State& s = call->s;
  work.set_args(SourceArgs{});
  if (gradients) o->g = work.list(s.g);
  o->m = work.flat(s.m);
  o->b = work.flat(s.b);
  o->den = work.flat(s.den);
  o->p = work.list(s.p);
  o->scalars = work.flat(s.groups);
  o->clip = call->coefficient(clip);
  call->m_at = o->m.at();
  call->b_at = o->b.at();
  call->p_at = o->p.at();
}

Call zeroone_in_place_local(const State& s, bool gradients, const float* clip) {
  Call call(KernelId::kZeroOneInPlaceLocal, s, false);
  bind_in_place(&call, &call.work.named<kernels::ZeroOneInPlaceLocal>(), gradients, clip);
  return call;
}

Call zeroone_in_place_sum(const State& s, bool gradients, const float* clip) {
  Call call(KernelId::kZeroOneInPlaceSum, s, false);
  auto& o = call.work.named<kernels::ZeroOneInPlaceSum>();
  bind_in_place(&call, &o.state, gradients, clip);
  o.x = call.work.list(s.p);
  o.flags = call.work.flat(std::vector<uint32_t>{0});
  call.c_at = o.x.at();
  return call;
}

Call zeroone_in_place_sync(const State& s, bool gradients, const float* clip) {
  Call call(KernelId::kZeroOneInPlaceSync, s, false);
  auto& o = call.work.named<kernels::ZeroOneInPlaceSync>();
  bind_in_place(&call, &o.state, gradients, clip);
  o.bits = call.bits();
  o.messages = call.messages();
  o.valid = call.valid();
  return call;
}

// What SGD and Lion share. make: numbers of a group.
template <class Make>
void bind_first_moment(Call* call, bool momentum, const float* clip, Make&& make) {
  KernelCase& work = call->work;
  const State& s = call->s;
  auto& o = work.named<kernels::Sgd>();
  o.g = work.list(s.g);
  if (momentum) o.m = work.flat(s.m);
  o.p = work.list(s.p);
  std::vector<decltype(make(s.groups[0]))> groups;
  for (const ZeroOneGroupScalars& group : s.groups) groups.push_back(make(group));
  o.scalars = work.flat(groups);
  o.clip = call->coefficient(clip);
  o.valid = call->valid();
  call->m_at = o.m.at();
  call->p_at = o.p.at();
}

Call sgd(const State& s, bool momentum, bool nesterov, const float* clip) {
  Call call(KernelId::kSgd, s, false);
  call.work.set_args(SgdArgs{nesterov});
  bind_first_moment(&call, momentum, clip, [](const ZeroOneGroupScalars& group) {
    return SgdGroupScalars{group, group.b1, group.one_minus_b1};
  });
  return call;
}

Call lion(const State& s, const float* clip) {
  Call call(KernelId::kLion, s, false);
  call.work.set_args(SourceArgs{});
  bind_first_moment(&call, true, clip, [](const ZeroOneGroupScalars& group) {
    return LionGroupScalars{group, group.decay};
  });
  return call;
}

// With sources of all types.
template <class Args>
void expect_equal(const KernelCase& work) {
  EXPECT_EQ(compare_on_all_targets(work), "");
  EXPECT_EQ(compare_low_precision_sources<Args>(work), "");
}

TEST(KernelsZeroOne, EqualTheReferenceOnEveryTarget) {
  Random random(50);
  const float clip = 0.8f;
  for (const Layout& layout : all_layouts()) {
    for (const int variant : {0, 1, 2, 3}) {
      if (kSanitized && (variant == 1 || variant == 2)) continue;
      SCOPED_TRACE(std::to_string(layout.elements()) + " variant " + std::to_string(variant));
      const State s(layout, &random, variant & 1, variant & 2);
      const float* factor = variant & 2 ? &clip : nullptr;
      const ScaleKind kind = variant & 1 ? ScaleKind::kL1 : ScaleKind::kL2;
      expect_equal<SourceArgs>(frozen_adam(s, false, factor).work);
      EXPECT_EQ(compare_on_all_targets(frozen_adam(s, true, nullptr).work), "");
      expect_equal<SourceArgs>(zeroone_local(s, factor).work);
      expect_equal<EncodeArgs>(zeroone_encode(s, kind, true, true, factor).work);
      for (const bool gradients : {false, true}) {
        Call encode = zeroone_encode(s, kind, false, gradients, factor);
        expect_equal<EncodeArgs>(encode.work);
        encode.work.id = KernelId::kZeroOneEncodeUndo;
        encode.work.paired_ran = variant & 1;
        expect_equal<EncodeArgs>(encode.work);
      }
      EXPECT_EQ(compare_on_all_targets(zeroone_sync(s, true).work), "");
      EXPECT_EQ(compare_on_all_targets(zeroone_sync(s, false).work), "");
      expect_equal<SgdArgs>(sgd(s, false, false, factor).work);
      expect_equal<SgdArgs>(sgd(s, true, variant & 1, factor).work);
      expect_equal<SourceArgs>(lion(s, factor).work);
    }
  }
}

// Calls f(tensor, element, flat index).
template <class F>
void for_each_element(const State& s, F&& f) {
  for (size_t t = 0; t < s.g.size(); ++t) {
    for (uint64_t i = 0; i < s.g[t].size(); ++i) f(t, i, s.layout.starts[t] + i);
  }
}

TEST(KernelsZeroOne, FollowTheFormulas) {
  Random random(51);
  const float clip = 0.8f;
  const State s(make_layout({7, 0, 65, 1, 8193}, 2, 512, 3), &random, false, true);
  const Call frozen = frozen_adam(s, true, nullptr), local = zeroone_local(s, &clip),
             sync = zeroone_sync(s, true),
             encode = zeroone_encode(s, ScaleKind::kL2, true, true, &clip);
  const Outcome after_frozen = execute_reference(frozen.work);
  const Outcome after_local = execute_reference(local.work);
  const Outcome after_sync = execute_reference(sync.work);
  const std::vector<float> x = execute_reference(encode.work).as<float>(encode.c_at);
  for_each_element(s, [&](size_t t, uint64_t i, uint64_t flat) {
    const ZeroOneGroupScalars& k = s.group(t);
    const double g = s.masked(flat) ? 0 : s.g[t][i] * 0.8;
    const double p = s.p[t][i];
    const auto at = [&](const Outcome& o, size_t index) { return o.as<float>(index + t)[i]; };
    const double mean = s.masked(flat) ? 0 : s.from_bits(flat);
    const double frozen_m = 0.9 * s.m[flat] + 0.1 * mean;
    const double u = frozen_m / (std::sqrt(s.v[flat]) + 1e-6) + k.weight_decay * p;
    ASSERT_NEAR(at(after_frozen, frozen.p_at), p - 0.02 * u, 2e-6 * (1 + std::abs(u)));
    const double m = s.masked(flat) ? 0 : 0.9 * s.m[flat] + 0.1 * g;
    const double b = s.masked(flat) ? 0 : s.b[flat] - 0.02 * m;
    const double moved = k.decay * s.anchor[flat] + b / s.den[flat];
    ASSERT_NEAR(at(after_local, local.p_at), moved, 2e-6 * (1 + std::abs(b / s.den[flat])));
    ASSERT_NEAR(x[flat], b, 1e-6);
    const double synced = k.decay * s.anchor[flat] + mean / s.den[flat];
    ASSERT_NEAR(at(after_sync, sync.p_at), synced, 2e-6 * (1 + std::abs(mean / s.den[flat])));
  });
  const std::vector<float> m = after_sync.as<float>(sync.m_at);
  const std::vector<float> b = after_sync.as<float>(sync.b_at);
  for_each_element(s, [&](size_t t, uint64_t, uint64_t flat) {
    const ZeroOneGroupScalars& k = s.group(t);
    const double mean = s.from_bits(flat);
    const double want = s.masked(flat) ? 0 : k.lr_sum == 0 ? s.m[flat] : -mean / k.lr_sum;
    ASSERT_NEAR(m[flat], want, 1e-6);
    ASSERT_EQ(b[flat], 0.0f);
  });
}

TEST(KernelsZeroOne, InPlaceFollowsTheFormulas) {
  Random random(54);
  const float clip = 0.8f;
  const State s(make_layout({7, 0, 65, 1, 8193}, 2, 512, 3), &random, false, true);
  for (const bool gradients : {true, false}) {
    const Call local = zeroone_in_place_local(s, gradients, &clip),
               sum = zeroone_in_place_sum(s, gradients, &clip),
               sync = zeroone_in_place_sync(s, gradients, &clip);
    const Outcome after_local = execute_reference(local.work);
    const Outcome after_sum = execute_reference(sum.work);
    const Outcome after_sync = execute_reference(sync.work);
    const std::vector<float> m = after_sync.as<float>(sync.m_at);
    for_each_element(s, [&](size_t t, uint64_t i, uint64_t flat) {
      const ZeroOneGroupScalars& k = s.group(t);
      const double p = s.p[t][i];
      const double new_m = 0.9 * s.m[flat] + 0.1 * 0.8 * s.g[t][i];
      const double step = gradients ? 0.02 * (new_m / s.den[flat] + k.weight_decay * p) : 0;
      const double b = s.b[flat] - step;
      const double tolerance = 4e-6 * (1 + std::abs(step));
      ASSERT_NEAR(after_local.as<float>(local.p_at + t)[i], p - step, tolerance);
      ASSERT_NEAR(after_local.as<float>(local.b_at)[flat], b, tolerance);
      ASSERT_NEAR(after_sum.as<float>(sum.c_at + t)[i], b * s.den[flat], tolerance);
      const double mean = s.masked(flat) ? 0 : s.from_bits(flat);
      ASSERT_NEAR(after_sync.as<float>(sync.p_at + t)[i], p - step - b + mean / s.den[flat],
                  4e-6 * (1 + std::abs(step) + std::abs(mean / s.den[flat])));
      const double kept = gradients ? new_m : s.m[flat];
      ASSERT_NEAR(m[flat], k.lr_sum == 0 ? kept : -mean / k.lr_sum, 1e-6);
      ASSERT_EQ(after_sync.as<float>(sync.b_at)[flat], 0.0f);
    });
  }
}

TEST(KernelsSgd, FollowsTheFormulas) {
  Random random(52);
  const float clip = 0.8f;
  const State s(make_layout({7, 0, 65, 8193}, 1, 512, 3), &random, false, true);
  for (const int variant : {0, 1, 2}) {  // none, momentum, Nesterov
    const Call call = sgd(s, variant > 0, variant == 2, &clip);
    const Outcome after = execute_reference(call.work);
    for_each_element(s, [&](size_t t, uint64_t i, uint64_t flat) {
      const double p = s.p[t][i];
      const double g = (s.masked(flat) ? 0 : s.g[t][i] * 0.8) + s.group(t).weight_decay * p;
      const double m = 0.9 * s.m[flat] + 0.1 * g;
      const double direction = variant == 0 ? g : variant == 1 ? m : g + 0.9 * m;
      ASSERT_NEAR(after.as<float>(call.p_at + t)[i], p - 0.02 * direction, 1e-6);
    });
  }
}

TEST(KernelsLion, FollowsTheFormulas) {
  Random random(55);
  const float clip = 0.8f;
  State s(make_layout({7, 0, 65, 8193}, 1, 512, 3), &random, false, true);
  // Where nothing has ever come the sign is 0.
  s.m[s.layout.starts[3]] = s.g[3][0] = 0;
  const Call call = lion(s, &clip);
  const Outcome after = execute_reference(call.work);
  const std::vector<float> m = after.as<float>(call.m_at);
  for_each_element(s, [&](size_t t, uint64_t i, uint64_t flat) {
    const double g = s.masked(flat) ? 0 : s.g[t][i] * 0.8;
    const double c = 0.9 * s.m[flat] + 0.1 * g;
    const double sign = std::abs(c) < 1e-9 ? 0 : c > 0 ? 1 : -1;
    ASSERT_NEAR(after.as<float>(call.p_at + t)[i], 0.998 * s.p[t][i] - 0.02 * sign, 1e-6);
    ASSERT_NEAR(m[flat], 0.99 * s.m[flat] + 0.01 * g, 1e-6);
  });
  EXPECT_EQ(after.as<float>(call.p_at + 3)[0], 0.998f * s.p[3][0]);
}

// The undo gives the residual back that was there before, up to one rounding.
TEST(KernelsZeroOne, UndoTakesTheEncodingBack) {
  Random random(53);
  State s(make_layout({8193}, 1, 512), &random, false, false);
  Call encode = zeroone_encode(s, ScaleKind::kL2, false, true, nullptr);
  const std::vector<float> before = s.c;
  const std::vector<float> encoded = execute_reference(encode.work).as<float>(encode.c_at);
  State after = s;
  after.c = encoded;
  Call undo = zeroone_encode(after, ScaleKind::kL2, false, true, nullptr);
  undo.work.id = KernelId::kZeroOneEncodeUndo;
  undo.work.paired_ran = true;
  const std::vector<float> back = execute_reference(undo.work).as<float>(undo.c_at);
  for (uint64_t i = 0; i < 8193; ++i) {
    const float e = before[i] - (before[i] >= 0 ? 0.08f : -0.08f);
    ASSERT_NEAR(back[i], e, 1e-6);
  }
}

}  // namespace
}  // namespace sotto::test
