// SGD, Lion and Adam over bfloat16 and 8-bit state: what is rounded, how, and the same on every
// target.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/base/bits.h"
#include "core/cpu/ops_state.h"
#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

constexpr StateType kTypes[] = {StateType::kBf16, StateType::kFp8};

template <class T>
std::vector<T> groups() {
  T s;
  s.lr = 0.01;
  s.b1 = 0.9f;
  s.one_minus_b1 = 0.1f;
  s.b2 = 0.999f;
  s.one_minus_b2 = static_cast<float>(1 - 0.999);
  s.eps = 1e-6f;
  std::vector<T> out = {s, s, s};
  out[1].weight_decay = 0.1f;
  out[2].weight_decay = 0.05f;
  return out;
}

// Of the optimizer that a kernel is of.
OperandMemory groups_of(KernelCase* work) {
  switch (work->id) {
    case KernelId::kSgd:
    case KernelId::kSgdLowPrecision: {
      auto sgd = groups<SgdGroupScalars>();
      for (SgdGroupScalars& s : sgd) s.momentum = 0.9f, s.one_minus_dampening = 0.1f;
      return work->flat(sgd);
    }
    case KernelId::kLion:
    case KernelId::kLionLowPrecision: {
      auto lion = groups<LionGroupScalars>();
      lion[1].decay = 0.999f;
      return work->flat(lion);
    }
    default: {
      auto adam = groups<AdamGroupScalars>();
      adam[0].c1 = 0.19f;
      adam[0].c2 = 0.002f;
      adam[2].decoupled = 0;
      return work->flat(adam);
    }
  }
}

// State of any type as bytes: elements and exponents as they are, which is how any stored state is.
struct LowPrecisionCase {
  LowPrecisionCase(KernelId id, const Layout& layout, StateType type, Random* random, bool specials,
                   const float* clip, const std::vector<uint8_t>* valid)
      : work(id), adam(id == KernelId::kAdamLowPrecision), g(random->tensors(layout.sizes)), p(g) {
    work.pieces = layout.by_tensor;
    LowPrecisionArgs args;
    args.state = type;
    args.nesterov = specials;
    work.set_args(args);
    for (auto& tensor : p) {
      for (float& x : tensor) x = 0.5f - x;
      if (specials) random->sprinkle(&tensor);
    }
    if (specials) {
      for (auto& tensor : g) random->sprinkle(&tensor);
    }
    if (adam) {
      auto& o = work.named<kernels::AdamLowPrecision>();
      bind(&o.adam, layout.padded, type, random, clip, valid);
      o.adam.v = state(layout.padded, type, random);
      o.step = work.flat(std::vector<uint64_t>{step});
      o.m_exponents = exponents(layout, type, random);
      o.v_exponents = exponents(layout, type, random);
      v_at = o.adam.v.at();
      exponents_at[0] = o.m_exponents.at();
      exponents_at[1] = o.v_exponents.at();
    } else {
      auto& o = work.named<kernels::SgdLowPrecision>();
      bind(&o.sgd, layout.padded, type, random, clip, valid);
      o.step = work.flat(std::vector<uint64_t>{step});
      o.m_exponents = exponents(layout, type, random);
      exponents_at[0] = o.m_exponents.at();
    }
  }
  // What all kernels have.
  template <class Operands>
  void bind(Operands* o, uint64_t n, StateType type, Random* random, const float* clip,
            const std::vector<uint8_t>* valid) {
    o->g = work.list(g);
    o->m = state(n, type, random);
    o->p = work.list(p);
    o->scalars = groups_of(&work);
    if (clip != nullptr) o->clip = work.flat(std::vector<float>{*clip});
    if (valid != nullptr) o->valid = work.flat(*valid);
    m_at = o->m.at();
    p_at = o->p.at();
  }
  // Any code that a state may have been given; bfloat16 also infinite.
  OperandMemory state(uint64_t n, StateType type, Random* random) {
    if (type == StateType::kFp8) return work.flat(random->bytes(n));
    std::vector<uint16_t> bits;
    for (const float x : random->positive(n, 0.1f, 0.0f)) bits.push_back(f32_to_bf16(x));
    if (n > 40) bits[n / 3] = 0x7f80;
    return work.flat(bits);
  }
  // Most keep values in the range of the gradients; the largest is that of the limit.
  OperandMemory exponents(const Layout& layout, StateType type, Random* random) {
    if (type != StateType::kFp8) return {};
    std::vector<uint8_t> out;
    for (uint64_t i = 0; i < layout.tensor_blocks * kStateBlocksPerNormBlock; ++i) {
      out.push_back(static_cast<uint8_t>(75 + random->below(15)));
      if (random->below(50) == 0) out.back() = random->below(2) == 0 ? 214 : 0;
    }
    return work.flat(out);
  }

  KernelCase work;
  bool adam;
  std::vector<std::vector<float>> g, p;
  uint64_t step = 17;
  size_t m_at = 0, v_at = 0, p_at = 0, exponents_at[2] = {};
};

TEST(KernelsLowPrecision, EveryTargetEqualsTheReference) {
  Random random(30);
  const float clip = 0.37f;
  for (const StateType type : kTypes) {
    for (Layout layout : all_layouts()) {
      for (const int variant : {0, 1, 2, 3}) {
        SCOPED_TRACE(
            fmt::format("{} {} variant {}", state_type_name(type), layout.elements(), variant));
        const std::vector<uint8_t> valid = random.mask(layout.padded);
        for (Piece& p : layout.by_tensor) p.group = (p.tensor + static_cast<uint32_t>(variant)) % 3;
        for (const KernelId id : {KernelId::kAdamLowPrecision, KernelId::kSgdLowPrecision,
                                  KernelId::kLionLowPrecision}) {
          const LowPrecisionCase narrow(id, layout, type, &random, variant & 1,
                                        variant & 1 ? &clip : nullptr,
                                        variant & 2 ? &valid : nullptr);
          EXPECT_EQ(compare_on_all_targets(narrow.work), "");
          EXPECT_EQ(compare_low_precision_sources<LowPrecisionArgs>(narrow.work), "");
        }
      }
    }
  }
}

// Number of the state block of every flat element, and its position in its norm block.
struct Place {
  uint64_t block = 0;
  uint32_t position = 0;
};
std::vector<Place> places_of(const Layout& layout) {
  std::vector<Place> out(layout.padded);
  for (const Piece& p : layout.by_tensor) {
    for (uint64_t j = 0; j < p.count; ++j) {
      const uint64_t at = p.block * kNormBlock + p.lane + j;
      out[p.flat + j] = {at / kStateBlock, static_cast<uint32_t>(at % kNormBlock)};
    }
  }
  return out;
}

// What an array holds as float32.
std::vector<float> widened(const std::vector<uint8_t>& bytes, const std::vector<uint8_t>& exponents,
                           StateType type, bool variance, const std::vector<Place>& places) {
  std::vector<float> out(places.size());
  for (uint64_t i = 0; i < out.size(); ++i) {
    if (type == StateType::kBf16) {
      out[i] = bf16_to_f32(static_cast<uint16_t>(bytes[2 * i] | bytes[2 * i + 1] << 8));
    } else if (variance) {
      out[i] = fp8_v_value(bytes[i], fp8_base(exponents[places[i].block], kFp8LargestV));
    } else {
      out[i] = fp8_m_value(bytes[i], fp8_base(exponents[places[i].block], kFp8LargestM));
    }
  }
  return out;
}

// The gap between the values around a magnitude. base: of fp8.
float gap(StateType type, float magnitude, uint32_t base) {
  if (type == StateType::kBf16) return std::exp2(std::floor(std::log2(magnitude)) - 7);
  const float least = fp8_value(0, base);
  return std::max(std::exp2(std::floor(std::log2(magnitude + least)) - 3), least / 9);
}

// Parameters move exactly as with float32 state of the same values; what is kept is one of the two
// neighbours of what float32 state would be.
TEST(KernelsLowPrecision, RoundsTheStateAndNothingElse) {
  Random random(31);
  const float clip = 0.5f;
  const Layout layout = make_layout({7, 0, 65, 1, 8193, 130, 700}, 2, 8, 3);
  const std::vector<uint8_t> valid = random.mask(layout.padded);
  const std::vector<Place> places = places_of(layout);
  for (const StateType type : kTypes) {
    for (const auto& [id, of_floats] : {std::pair{KernelId::kAdamLowPrecision, KernelId::kAdam},
                                        {KernelId::kSgdLowPrecision, KernelId::kSgd},
                                        {KernelId::kLionLowPrecision, KernelId::kLion}}) {
      const bool adam = id == KernelId::kAdamLowPrecision;
      const LowPrecisionCase narrow(id, layout, type, &random, false, &clip, &valid);
      const auto values = [&](const std::vector<std::vector<uint8_t>>& memory, bool v) {
        return widened(memory[v ? narrow.v_at : narrow.m_at], memory[narrow.exponents_at[v]], type,
                       v, places);
      };
      std::vector<std::vector<uint8_t>> before;
      for (const Memory& m : narrow.work.memory) before.push_back(m.bytes);
      KernelCase wide(of_floats);
      wide.pieces = narrow.work.pieces;
      id == KernelId::kSgdLowPrecision ? wide.set_args(SgdArgs{false})
                                       : wide.set_args(SourceArgs{});
      size_t m_at = 0, v_at = 0, p_at = 0;
      const auto bind = [&](auto& o) {
        o.g = wide.list(narrow.g);
        o.m = wide.flat(values(before, false));
        o.p = wide.list(narrow.p);
        o.scalars = groups_of(&wide);
        o.clip = wide.flat(std::vector<float>{clip});
        o.valid = wide.flat(valid);
        m_at = o.m.at();
        p_at = o.p.at();
      };
      if (adam) {
        auto& o = wide.named<kernels::Adam>();
        bind(o);
        o.v = wide.flat(values(before, true));
        v_at = o.v.at();
      } else {
        bind(wide.named<kernels::Sgd>());
      }

      const Outcome got = execute_reference(narrow.work), want = execute_reference(wide);
      for (size_t t = 0; t < layout.sizes.size(); ++t)
        ASSERT_EQ(got.memory[narrow.p_at + t], want.memory[p_at + t]) << t;
      for (int array = 0; array < (adam ? 2 : 1); ++array) {
        const bool v = array == 1;
        const std::vector<float> kept = values(got.memory, v);
        const std::vector<float> exact = want.as<float>(v ? v_at : m_at);
        const std::vector<uint8_t>& exponents = got.memory[narrow.exponents_at[array]];
        for (const Piece& p : layout.by_tensor) {
          for (uint64_t i = p.flat; i < p.flat + p.count; ++i) {
            if (std::isinf(exact[i])) {
              ASSERT_EQ(kept[i], std::copysign(kBf16Limit, exact[i]));
              continue;
            }
            if (type == StateType::kBf16) {
              ASSERT_LE(std::fabs(kept[i] - exact[i]), gap(type, std::fabs(exact[i]), 0)) << i;
              continue;
            }
            const uint32_t base =
                fp8_base(exponents[places[i].block], v ? kFp8LargestV : kFp8LargestM);
            const float least = v ? fp8_value(0, base) : 0;
            const float bounded = within(exact[i], kFp8Limit);
            const float room = std::max(least, gap(type, std::fabs(bounded), base));
            ASSERT_LE(std::fabs(kept[i] - bounded), room) << i << " " << exact[i];
            ASSERT_GE(v ? kept[i] : 0, least) << i;
          }
        }
      }
    }
  }
}

// The mean of many roundings is the value.
TEST(LowPrecisionState, RoundingHasNoBias) {
  constexpr uint32_t kSteps = 1 << 16;
  const auto mean_of = [&](auto&& rounded) {
    double sum = 0;
    for (uint32_t step = 1; step <= kSteps; ++step)
      sum += static_cast<double>(rounded(rounding_bits(rounding_key(step, 3), 501)));
    return sum / kSteps;
  };
  const uint8_t one = fp8_v_exponent(1.0f);
  const uint32_t base_m = fp8_base(one, kFp8LargestM), base_v = fp8_base(one, kFp8LargestV);
  const auto m_of = [&](float x) {
    return mean_of([&](uint32_t r) { return fp8_m_value(fp8_m_code(x, base_m, r >> 12), base_m); });
  };
  Random random(32);
  for (const float unit : random.normal(100, 0.3f)) {
    const float x = std::clamp(unit, -0.99f, 0.99f), positive = std::fabs(x), tiny = x * 0x1p-17f;
    // Six standard deviations of the mean, at most.
    const auto bound = [&](float step) { return 3 * static_cast<double>(step) / 256; };
    const double fine = bound(gap(StateType::kBf16, positive, 0));
    EXPECT_NEAR(mean_of([&](uint32_t r) { return bf16_to_f32(bf16_m_code(x, r)); }), x, fine);
    EXPECT_NEAR(mean_of([&](uint32_t r) { return bf16_to_f32(bf16_v_code(positive, r)); }),
                positive, fine);
    EXPECT_NEAR(m_of(x), x, bound(gap(StateType::kFp8, positive, base_m)));
    EXPECT_NEAR(m_of(tiny), tiny, bound(gap(StateType::kFp8, std::fabs(tiny), base_m)));
    EXPECT_NEAR(mean_of([&](uint32_t r) {
                  return fp8_v_value(fp8_v_code(positive, base_v, r & 0xfffff), base_v);
                }),
                positive, bound(gap(StateType::kFp8, positive, base_v)));
  }
}

// Neighbouring elements, far ones, steps, blocks and the two arrays round independently.
TEST(LowPrecisionState, RandomBitsAreUncorrelated) {
  constexpr uint32_t kCount = 1 << 16;
  const auto half = [](uint32_t bits, bool v) {
    return static_cast<double>(v ? bits & 0xffff : bits >> 16) / 65535 - 0.5;
  };
  struct Other {
    uint64_t step, block;
    uint32_t position;
    bool v;
  };
  for (const Other& o :
       {Other{0, 0, 0, true}, Other{0, 0, 1, false}, Other{0, 0, 4096, false},
        Other{1, 0, 0, false}, Other{0, 1, 0, false}, Other{1, 0, 0, true}, Other{0, 0, 1, true}}) {
    double sum = 0, product = 0, square = 0;
    for (uint32_t i = 0; i < kCount; ++i) {
      const uint64_t step = i / 256, block = i % 256;
      const double a = half(rounding_bits(rounding_key(step, block), i % 4096), false);
      const double b = half(
          rounding_bits(rounding_key(step + o.step, block + o.block), i % 4096 + o.position), o.v);
      sum += a;
      square += a * a;
      product += a * b;
    }
    EXPECT_NEAR(sum / kCount, 0, 0.006);
    EXPECT_NEAR(square / kCount, 1.0 / 12, 0.003);
    EXPECT_NEAR(product / kCount, 0, 0.002);  // 6 sigma: 6 / 12 / 256
  }
}

// Rounding leaves what a type has already, whatever the random bits are.
TEST(LowPrecisionState, CodesSurviveFloats) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto code = static_cast<uint16_t>(bits);
    if (!std::isfinite(bf16_to_f32(code))) continue;
    for (const uint32_t random : {0u, 0x8000u, 0xffffu}) {
      ASSERT_EQ(bf16_rounded(bf16_to_f32(code), random), code);
    }
  }
  for (const int exponent : {0, 1, 60, 87, 214}) {
    const uint32_t base_m = fp8_base(static_cast<uint8_t>(exponent), kFp8LargestM);
    const uint32_t base_v = fp8_base(static_cast<uint8_t>(exponent), kFp8LargestV);
    // The exponent is found again from the largest value, or is the next one to that.
    for (uint8_t code = 119; code < 128 && exponent > 0; ++code)
      EXPECT_EQ(fp8_m_exponent(fp8_m_value(code, base_m)), exponent - (code == 119)) << code;
    for (uint32_t i = 0; i < 256; ++i) {
      const auto code = static_cast<uint8_t>(i);
      for (const uint32_t random : {0u, 0x80000u, 0xfffffu}) {
        ASSERT_EQ(fp8_m_code(fp8_m_value(code, base_m), base_m, random), code);
        ASSERT_EQ(fp8_v_code(fp8_v_value(code, base_v), base_v, random), code);
        // v with an exponent that is enough for a smaller largest code.
        if (exponent == 0) continue;
        const uint32_t lower = fp8_base(static_cast<uint8_t>(exponent - 1), kFp8LargestV);
        const float x = fp8_v_value(code, base_v);
        if (i <= kFp8LargestV - 8) {
          ASSERT_EQ(fp8_v_value(fp8_v_code(x, lower, random), lower), x);
        }
      }
    }
  }
}

// A block's exponent is enough for its largest element, and no larger than that.
TEST(LowPrecisionState, ExponentsFit) {
  Random random(33);
  for (float x : random.positive(20000, 1.0f, 0.0f)) {
    x = std::ldexp(x, static_cast<int>(random.below(150)) - 75);
    for (const float most : {x, std::exp2(std::round(std::log2(x)))}) {
      const uint8_t m = fp8_m_exponent(most), v = fp8_v_exponent(most);
      const uint32_t base_m = fp8_base(m, kFp8LargestM), base_v = fp8_base(v, kFp8LargestV);
      if (m == 0) continue;
      ASSERT_LE(most, fp8_m_value(127, base_m));
      ASSERT_LE(most, fp8_v_value(255, base_v));
      for (const uint32_t bits : {0u, 0xfffffu}) {
        ASSERT_GE(fp8_m_code(most, base_m, bits), 119);
        ASSERT_LE(fp8_m_code(most, base_m, bits), 127);
        ASSERT_GE(fp8_v_code(most, base_v, bits), 247);
      }
    }
  }
}

TEST(LowPrecisionState, TheEndsOfTheRange) {
  using Limits = std::numeric_limits<float>;
  for (const float x : {Limits::max(), Limits::infinity(), Limits::quiet_NaN()}) {
    for (const uint32_t bits : {0u, 0xffffffffu}) {
      EXPECT_EQ(bf16_to_f32(bf16_m_code(x, bits)), kBf16Limit);
      EXPECT_EQ(bf16_to_f32(bf16_v_code(x, bits)), kBf16Limit);
      if (x == x) {
        EXPECT_EQ(bf16_to_f32(bf16_m_code(-x, bits)), -kBf16Limit);
      }
    }
    EXPECT_EQ(within(x, kFp8Limit), kFp8Limit);
    EXPECT_EQ(at_most(x, kFp8Limit), kFp8Limit);
  }
  const uint8_t m = fp8_m_exponent(kFp8Limit), v = fp8_v_exponent(kFp8Limit);
  const uint32_t base_m = fp8_base(m, kFp8LargestM), base_v = fp8_base(v, kFp8LargestV);
  for (const uint32_t bits : {0u, 0xfffffu}) {
    EXPECT_TRUE(std::isfinite(fp8_m_value(fp8_m_code(-kFp8Limit, base_m, bits), base_m)));
    EXPECT_EQ(fp8_v_value(fp8_v_code(kFp8Limit, base_v, bits), base_v), kFp8Limit);
  }
  // Memory that is all 0: no m, and the least v, whose square root is a normal number.
  const uint32_t least_m = fp8_base(0, kFp8LargestM), least_v = fp8_base(0, kFp8LargestV);
  EXPECT_EQ(fp8_m_value(0, least_m), 0.0f);
  EXPECT_GE(fp8_v_value(0, least_v), Limits::min());
  EXPECT_LE(fp8_v_value(0, least_v), 1e-35f);
  EXPECT_EQ(fp8_m_exponent(0.0f), 0);
  EXPECT_EQ(fp8_v_exponent(0.0f), 0);
  for (const uint32_t bits : {0u, 0xfffffu}) {
    EXPECT_EQ(fp8_m_code(0.0f, base_m, bits), 0);
    EXPECT_EQ(fp8_v_code(0.0f, base_v, bits), 0);
    EXPECT_EQ(fp8_v_code(Limits::denorm_min(), base_v, bits), 0);
  }
}

}  // namespace
}  // namespace sotto::test
