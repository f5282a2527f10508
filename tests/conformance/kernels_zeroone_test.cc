// Kernels of 0/1 Adam, SGD and Lion.
#include <gtest/gtest.h>

#include <cmath>

#include "core/base/bits.h"
#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

GroupScalars scalars(float wd) {
  GroupScalars s;
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

// Memory that the kernels share, and one kernel call on it. Members are filled in the order of the
// operands that core/kernels/zeroone.h gives.
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
  const GroupScalars& group(size_t tensor) const { return groups[tensor % groups.size()]; }

  Layout layout;
  bool use_masks;
  std::vector<GroupScalars> groups;
  std::vector<std::vector<float>> g, p;
  std::vector<float> m, b, c, v, den, anchor;
  std::vector<uint8_t> bits, valid;
  std::vector<std::vector<float>> scales;
};

struct Call {
  Call(KernelId id, const State& state, bool by_chunk) : s(state), work(id) {
    work.pieces = by_chunk ? s.layout.by_chunk : s.layout.by_tensor;
  }
  void bits(bool present) {
    if (present) {
      work.add_flat(s.bits);
      work.add_flat(make_messages(s.scales));
    } else {
      work.add_null();
      work.add_null();
    }
  }
  void optional(bool present, const std::vector<uint8_t>& values) {
    present ? work.add_flat(values) : work.add_null();
  }
  void coefficient(const float* value) {
    value != nullptr ? work.add_flat(std::vector<float>{*value}) : work.add_null();
  }
  const State& s;
  KernelCase work;
  size_t m_at = 0, b_at = 0, p_at = 0, c_at = 0, anchor_at = 0;
};

Call frozen_adam(const State& s, bool as_bits, const float* clip) {
  Call call(KernelId::kFrozenAdam, s, false);
  call.work.set_args(SourceArgs{});
  as_bits ? call.work.add_null() : call.work.add_list(s.g);
  call.bits(as_bits);
  call.m_at = call.work.add_flat(s.m);
  call.work.add_flat(s.v);
  call.p_at = call.work.add_list(s.p);
  call.work.add_flat(s.groups);
  call.coefficient(clip);
  call.optional(s.use_masks, s.valid);
  return call;
}

Call zeroone_local(const State& s, const float* clip) {
  Call call(KernelId::kZeroOneLocal, s, false);
  call.work.set_args(SourceArgs{});
  call.work.add_list(s.g);
  call.m_at = call.work.add_flat(s.m);
  call.b_at = call.work.add_flat(s.b);
  call.work.add_flat(s.den);
  call.work.add_flat(s.anchor);
  call.p_at = call.work.add_list(s.p);
  call.work.add_flat(s.groups);
  call.coefficient(clip);
  call.optional(s.use_masks, s.valid);
  return call;
}

Call zeroone_encode(const State& s, ScaleKind kind, bool identity, bool gradients,
                    const float* clip) {
  Call call(KernelId::kZeroOneEncode, s, true);
  EncodeArgs args{};
  args.scale = kind;
  args.identity = identity;
  call.work.set_args(args);
  gradients ? call.work.add_list(s.g) : call.work.add_null();
  call.work.add_flat(s.m);
  call.work.add_flat(s.b);
  call.c_at = call.work.add_flat(s.c);
  if (identity) {
    for (int i = 0; i < 3; ++i) call.work.add_null();
  } else {
    call.work.add_flat(std::vector<float>{0.08f});
    call.work.add_flat(std::vector<uint8_t>(s.layout.padded / 8));
    call.work.add_flat(std::vector<float>(s.layout.chunk_blocks, -1.0f));
  }
  call.optional(s.use_masks, s.valid);
  call.work.add_flat(std::vector<uint32_t>{0});
  call.work.add_flat(s.groups);
  call.coefficient(clip);
  return call;
}

Call zeroone_sync(const State& s, bool as_bits) {
  Call call(KernelId::kZeroOneSync, s, false);
  as_bits ? call.work.add_null() : call.work.add_flat(s.c);
  call.bits(as_bits);
  call.m_at = call.work.add_flat(s.m);
  call.b_at = call.work.add_flat(s.b);
  call.work.add_flat(s.den);
  call.anchor_at = call.work.add_flat(s.anchor);
  call.p_at = call.work.add_list(s.p);
  call.work.add_flat(s.groups);
  call.optional(s.use_masks, s.valid);
  return call;
}

// The operands that the kernels of mode compat share.
Call in_place(KernelId id, const State& s, bool gradients, const float* clip) {
  Call call(id, s, false);
  call.work.set_args(SourceArgs{});
  gradients ? call.work.add_list(s.g) : call.work.add_null();
  call.m_at = call.work.add_flat(s.m);
  call.b_at = call.work.add_flat(s.b);
  call.work.add_flat(s.den);
  call.p_at = call.work.add_list(s.p);
  call.work.add_flat(s.groups);
  call.coefficient(clip);
  return call;
}

Call zeroone_in_place_sum(const State& s, bool gradients, const float* clip) {
  Call call = in_place(KernelId::kZeroOneInPlaceSum, s, gradients, clip);
  call.c_at = call.work.add_list(s.p);
  call.work.add_flat(std::vector<uint32_t>{0});
  return call;
}

Call zeroone_in_place_sync(const State& s, bool gradients, const float* clip) {
  Call call = in_place(KernelId::kZeroOneInPlaceSync, s, gradients, clip);
  call.work.add_null();
  call.bits(true);
  call.optional(s.use_masks, s.valid);
  return call;
}

Call sgd(const State& s, bool momentum, bool nesterov, const float* clip) {
  Call call(KernelId::kSgd, s, false);
  call.work.set_args(SgdArgs{nesterov});
  call.work.add_list(s.g);
  call.m_at = momentum ? call.work.add_flat(s.m) : call.work.add_null();
  call.p_at = call.work.add_list(s.p);
  call.work.add_flat(s.groups);
  call.coefficient(clip);
  call.optional(s.use_masks, s.valid);
  return call;
}

Call lion(const State& s, const float* clip) {
  Call call(KernelId::kLion, s, false);
  call.work.set_args(SourceArgs{});
  call.work.add_list(s.g);
  call.m_at = call.work.add_flat(s.m);
  call.p_at = call.work.add_list(s.p);
  call.work.add_flat(s.groups);
  call.coefficient(clip);
  call.optional(s.use_masks, s.valid);
  return call;
}

// With sources of all types.
template <class Args>
void expect_equal(const KernelCase& work) {
  EXPECT_EQ(compare_on_all_targets(work), "");
  EXPECT_EQ(compare_narrow_sources<Args>(work), "");
}

TEST(KernelsZeroOne, EqualTheReferenceOnEveryTarget) {
  Random random(50);
  const float clip = 0.8f;
  for (const Layout& layout : all_layouts()) {
    for (const int variant : {0, 1, 2, 3}) {
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
    const GroupScalars& k = s.group(t);
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
    const GroupScalars& k = s.group(t);
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
    const Call local = in_place(KernelId::kZeroOneInPlaceLocal, s, gradients, &clip),
               sum = zeroone_in_place_sum(s, gradients, &clip),
               sync = zeroone_in_place_sync(s, gradients, &clip);
    const Outcome after_local = execute_reference(local.work);
    const Outcome after_sum = execute_reference(sum.work);
    const Outcome after_sync = execute_reference(sync.work);
    const std::vector<float> m = after_sync.as<float>(sync.m_at);
    for_each_element(s, [&](size_t t, uint64_t i, uint64_t flat) {
      const GroupScalars& k = s.group(t);
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
