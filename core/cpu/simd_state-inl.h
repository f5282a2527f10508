// Vectors of optimizer state of every type. Included once per target, like simd-inl.h.
#if defined(SOTTO_CORE_CPU_SIMD_STATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SOTTO_CORE_CPU_SIMD_STATE_INL_H_
#undef SOTTO_CORE_CPU_SIMD_STATE_INL_H_
#else
#define SOTTO_CORE_CPU_SIMD_STATE_INL_H_
#endif

#include "core/cpu/ops_state.h"
#include "core/cpu/simd-inl.h"
#include "core/cpu/simd_bytes-inl.h"
#include "core/cpu/simd_types-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {

using DU8 = hn::Rebind<uint8_t, DF>;

// rounding_bits of vector after vector of elements from `position` on.
class RoundingVectors {
 public:
  HWY_INLINE RoundingVectors(RoundingKey key, uint32_t position)
      : next_(hn::Add(hn::Mul(hn::Iota(DU(), 0), hn::Set(DU(), key.factor)),
                      hn::Set(DU(), rounding_bits(key, position)))),
        step_(hn::Set(DU(), static_cast<uint32_t>(kN) * key.factor)) {}
  HWY_INLINE VU take() {
    const VU bits = next_;
    next_ = hn::Add(next_, step_);
    return bits;
  }

 private:
  VU next_, step_;
};

// at_most, at_least: of NaN the second operand.
HWY_INLINE VF at_most(VF x, float limit) { return hn::Min(x, set(limit)); }
HWY_INLINE VF at_least(VF x, float limit) { return hn::Max(x, set(limit)); }
HWY_INLINE VF within(VF x, float limit) { return at_least(at_most(x, limit), -limit); }

// bf16_rounded.
HWY_INLINE void store_bf16(VF x, VU random, uint16_t* p) {
  const VU sum = hn::Add(hn::BitCast(DU(), x), random);
#if HWY_TARGET == HWY_AVX2
  // Upper halves of the lanes to the lower half of each half of the vector, then together.
  const __m256i upper =
      _mm256_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1, 2, 3, 6, 7, 10,
                       11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(sum.raw, upper), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(halves));
#else
  using D16 = hn::Rebind<uint16_t, DF>;
  hn::StoreU(hn::DemoteTo(D16(), hn::BitCast(DI(), hn::ShiftRight<16>(sum))), D16(), p);
#endif
}

// fp8_value of codes in lanes of 32 bits.
HWY_INLINE VF fp8_values(VU codes, uint32_t base) {
  return hn::BitCast(DF(), hn::Add(hn::ShiftLeft<20>(codes), hn::Set(DU(), base)));
}
HWY_INLINE VU load_codes(const uint8_t* p) { return hn::PromoteTo(DU(), hn::LoadU(DU8(), p)); }

// Vectors whose codes are packed at once.
constexpr uint32_t kFp8Vectors = 4;

HWY_INLINE VU fp8_m_codes(VF m, uint32_t base, VU random) {
  const VF shifted = hn::Add(hn::Abs(m), set(std::bit_cast<float>(base)));
  const VU sum = hn::Add(hn::BitCast(DU(), shifted), random);
  const VU code = hn::ShiftRight<20>(hn::Sub(sum, hn::Set(DU(), base)));
  const VU sign = hn::And(hn::ShiftRight<24>(hn::BitCast(DU(), m)), hn::Set(DU(), 0x80));
  return hn::Or(code, sign);
}
HWY_INLINE VU fp8_v_codes(VF v, uint32_t base, VU random) {
  const VU value = hn::BitCast(DU(), at_least(v, std::bit_cast<float>(base)));
  return hn::ShiftRight<20>(hn::Sub(hn::Add(value, random), hn::Set(DU(), base)));
}

struct VectorFp8 {
  static HWY_NOINLINE float largest(const float* x, uint32_t n) {
    const uint32_t whole = n / (2 * kN) * (2 * kN);
    VF most[2] = {hn::Zero(DF()), hn::Zero(DF())};
    for (uint32_t i = 0; i < whole; i += 2 * kN) {
      most[0] = hn::Max(most[0], hn::Abs(load(x + i)));
      most[1] = hn::Max(most[1], hn::Abs(load(x + i + kN)));
    }
    const float found = hn::GetLane(hn::MaxOfLanes(DF(), hn::Max(most[0], most[1])));
    return std::max(found, ScalarFp8::largest(x + whole, n - whole));
  }
  static HWY_NOINLINE void pack(const float* m, const float* v, uint32_t n, RoundingKey key,
                                uint32_t position, uint32_t m_base, uint32_t v_base,
                                uint8_t* m_codes, uint8_t* v_codes) {
    constexpr uint32_t kStep = kFp8Vectors * kN;
    const uint32_t whole = n / kStep * kStep;
    RoundingVectors rounding(key, position);
    for (uint32_t i = 0; i < whole; i += kStep) {
      VU m_code[kFp8Vectors], v_code[kFp8Vectors];
      HWY_UNROLL(4) for (uint32_t k = 0; k < kFp8Vectors; ++k) {
        const uint32_t at = i + static_cast<uint32_t>(k * kN);
        const VU random = rounding.take();
        m_code[k] = fp8_m_codes(load(m + at), m_base, hn::ShiftRight<12>(random));
        if (v != nullptr) {
          v_code[k] = fp8_v_codes(load(v + at), v_base, hn::And(random, hn::Set(DU(), 0xfffffu)));
        }
      }
      store_codes(m_code, m_codes + i);
      if (v != nullptr) store_codes(v_code, v_codes + i);
    }
    if (whole == n) return;
    ScalarFp8::pack(m + whole, v != nullptr ? v + whole : nullptr, n - whole, key, position + whole,
                    m_base, v_base, m_codes + whole, v != nullptr ? v_codes + whole : nullptr);
  }
};

// Old values from flat element `at` on, and new ones, vector after vector of a group. position: of
// the first in its norm block. kV: there is a v.
struct NoRounding {};
HWY_INLINE NoRounding rounding_of(const FloatState&, uint32_t) { return {}; }
HWY_INLINE VF old_m(const FloatState& s, uint64_t at) { return load(s.m + at); }
HWY_INLINE VF old_v(const FloatState& s, uint64_t at) { return load(s.v + at); }
template <bool kV>
HWY_INLINE void keep(FloatState& s, NoRounding&, VF m, VF v, uint64_t at, uint32_t) {
  store(m, s.m + at);
  if constexpr (kV) store(v, s.v + at);
}

HWY_INLINE RoundingVectors rounding_of(const Bf16State& s, uint32_t position) {
  return RoundingVectors(s.key, position);
}
HWY_INLINE VF old_m(const Bf16State& s, uint64_t at) { return Brain::load(s.m + at); }
HWY_INLINE VF old_v(const Bf16State& s, uint64_t at) { return Brain::load(s.v + at); }
template <bool kV>
HWY_INLINE void keep(Bf16State& s, RoundingVectors& rounding, VF m, VF v, uint64_t at, uint32_t) {
  const VU random = rounding.take();
  store_bf16(within(m, kBf16Limit), hn::ShiftRight<16>(random), s.m + at);
  if constexpr (kV) {
    store_bf16(at_most(v, kBf16Limit), hn::And(random, hn::Set(DU(), 0xffffu)), s.v + at);
  }
}

using Fp8Vectors = Fp8State<VectorFp8>;
HWY_INLINE NoRounding rounding_of(const Fp8Vectors&, uint32_t) { return {}; }
HWY_INLINE VF old_m(const Fp8Vectors& s, uint64_t at) {
  const VU codes = load_codes(s.m + at);
  const VF magnitude = hn::Sub(fp8_values(hn::And(codes, hn::Set(DU(), 0x7f)), s.m_base),
                               set(std::bit_cast<float>(s.m_base)));
  const VU sign = hn::ShiftLeft<24>(hn::And(codes, hn::Set(DU(), 0x80)));
  return hn::Or(magnitude, hn::BitCast(DF(), sign));
}
HWY_INLINE VF old_v(const Fp8Vectors& s, uint64_t at) {
  return fp8_values(load_codes(s.v + at), s.v_base);
}
template <bool kV>
HWY_INLINE void keep(Fp8Vectors& s, NoRounding&, VF m, VF v, uint64_t, uint32_t position) {
  store(within(m, kFp8Limit), s.new_m + position % kStateBlock);
  if constexpr (kV) store(at_most(v, kFp8Limit), s.new_v + position % kStateBlock);
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
#endif  // per-target guard
