// Parts of the vector kernels. Included once per target from files that foreach_target.h includes
// again and again, hence no include guard of the usual kind.
//
// The unit of work is a group of 64 elements: one norm lane each, one 64-bit word of a bit array.
// Arithmetic is Mul, Add, Sub, Div and Sqrt, which round once each; MulAdd is fused on some targets
// and is not used.
#if defined(SOTTO_CORE_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SOTTO_CORE_CPU_SIMD_INL_H_
#undef SOTTO_CORE_CPU_SIMD_INL_H_
#else
#define SOTTO_CORE_CPU_SIMD_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "core/base/bits.h"
#include "core/cpu/elements.h"
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops.h"

// The scalar table takes the place of Highway's own fallbacks.
#undef SOTTO_SIMD_TARGET
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
#define SOTTO_SIMD_TARGET 1
#else
#define SOTTO_SIMD_TARGET 0
#endif

#if SOTTO_SIMD_TARGET

HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = HWY_FULL(float);
using DU = hn::RebindToUnsigned<DF>;
using DI = hn::RebindToSigned<DF>;
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;
using VI = hn::Vec<DI>;
using MF = hn::Mask<DF>;

constexpr size_t kN = hn::MaxLanes(DF());     // float32 per vector: 4, 8 or 16
constexpr size_t kVectors = kNormLanes / kN;  // vectors per group
static_assert(kN == 4 || kN == 8 || kN == 16);

// Calls f(k, offset in elements) for every vector of a group, unrolled.
#define SOTTO_FOR_VECTORS(k) HWY_UNROLL(16) for (size_t k = 0; k < kVectors; ++k)

HWY_INLINE VF load(const float* p) { return hn::LoadU(DF(), p); }
HWY_INLINE void store(VF v, float* p) { hn::StoreU(v, DF(), p); }
HWY_INLINE VF set(float x) { return hn::Set(DF(), x); }

// Elements of an array that are only written go to memory directly, but for the first ones: small
// arrays stay in the cache.
constexpr uint64_t kCachedElements = 65536;

// Whether those from element `at` of the array on, at `to`, do. hwy::FlushStream() follows.
HWY_INLINE bool streams(uint64_t at, const float* to) {
  return at >= kCachedElements && reinterpret_cast<uintptr_t>(to) % 64 == 0;
}
template <bool kStream>
HWY_INLINE void store_or_stream(VF v, float* p) {
  if constexpr (kStream) {
    hn::Stream(v, DF(), p);
  } else {
    store(v, p);
  }
}

// 64 bits of a bit array as lane masks. Word: element i is bit 63 - i, as load_bits64 gives.
class WordMasks {
 public:
  HWY_INLINE explicit WordMasks(uint64_t word)
      : half_{hn::Set(DU(), static_cast<uint32_t>(word >> 32)),
              hn::Set(DU(), static_cast<uint32_t>(word))} {}
  // Elements k * kN .. of the group.
  HWY_INLINE MF operator[](size_t k) const {
    const VU bits = hn::Load(DU(), kBits + k * kN % 32);
    return hn::RebindMask(DF(), hn::TestBit(half_[k * kN / 32], bits));
  }

  // yes where the element's bit is 1, else no.
  HWY_INLINE VF choose(size_t k, VF yes, VF no) const {
#if HWY_TARGET == HWY_AVX2  // blends look at the sign, so a shift makes the mask
    const VU place = hn::Load(DU(), kPlaces + k * kN % 32);
    const VF sign = hn::BitCast(DF(), hn::Shl(half_[k * kN / 32], place));
    return hn::IfThenElse(hn::MaskFromVec(sign), yes, no);
#else
    return hn::IfThenElse((*this)[k], yes, no);
#endif
  }

 private:
#if HWY_TARGET == HWY_AVX2
  alignas(64) static constexpr uint32_t kPlaces[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                                       11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                                       22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
#endif
  // Bit of element i of a half word.
  alignas(64) static constexpr uint32_t kBits[32] = {
      1u << 31, 1u << 30, 1u << 29, 1u << 28, 1u << 27, 1u << 26, 1u << 25, 1u << 24,
      1u << 23, 1u << 22, 1u << 21, 1u << 20, 1u << 19, 1u << 18, 1u << 17, 1u << 16,
      1u << 15, 1u << 14, 1u << 13, 1u << 12, 1u << 11, 1u << 10, 1u << 9,  1u << 8,
      1u << 7,  1u << 6,  1u << 5,  1u << 4,  1u << 3,  1u << 2,  1u << 1,  1u << 0};
  VU half_[2];
};

// The opposite: collects the lane masks of a group in ascending k and writes them to 8 bytes.
#if HWY_TARGET == HWY_AVX2
// Highway has no demotion of masks; packing 32 lanes to bytes takes the mask of all of them, bits
// reversed, at once.
class WordBuilder {
 public:
  HWY_INLINE explicit WordBuilder(uint8_t* bytes) : bytes_(bytes) {}
  HWY_INLINE void add(size_t k, MF mask) {
    const __m256i lanes = hn::BitCast(DI(), hn::VecFromMask(DF(), mask)).raw;
    if (k % 2 == 0) {
      even_ = lanes;
      return;
    }
    const __m256i words = _mm256_packs_epi32(even_, lanes);
    if (k % 4 == 1) {
      low_ = words;
      return;
    }
    // Vectors a, b, c, d: a0-3 b0-3 c0-3 d0-3 in the lower half, a4-7 .. in the upper. Wanted: a7
    // .. a0, b7 .. b0, ...
    const __m256i order = _mm256_setr_epi32(4, 0, 5, 1, 6, 2, 7, 3);
    const __m256i reverse = _mm256_setr_epi8(3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12,
                                             3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12);
    const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low_, words), order);
    const int bits = _mm256_movemask_epi8(_mm256_shuffle_epi8(packed, reverse));
    std::memcpy(bytes_ + k / 4 * 4, &bits, 4);
  }
  HWY_INLINE void store() const {}

 private:
  uint8_t* bytes_;
  __m256i even_, low_;
};
#else
class WordBuilder {
 public:
  HWY_INLINE explicit WordBuilder(uint8_t* bytes) : bytes_(bytes) {}
  HWY_INLINE void add(size_t k, MF mask) {
    alignas(8) uint8_t bits[8] = {};
    hn::StoreMaskBits(DF(), mask, bits);
    uint64_t lanes;
    std::memcpy(&lanes, bits, 8);
    word_ |= lanes << (k * kN);
  }
  // Element i is bit i here, and bit 7 - i % 8 of its byte in the array.
  HWY_INLINE void store() const {
    uint64_t w = word_;
    w = (w >> 1 & 0x5555555555555555u) | (w & 0x5555555555555555u) << 1;
    w = (w >> 2 & 0x3333333333333333u) | (w & 0x3333333333333333u) << 2;
    w = (w >> 4 & 0x0f0f0f0f0f0f0f0fu) | (w & 0x0f0f0f0f0f0f0f0fu) << 4;
    std::memcpy(bytes_, &w, 8);
  }

 private:
  uint8_t* bytes_;
  uint64_t word_ = 0;
};
#endif

HWY_INLINE MF finite(VF x) {
  const auto magnitude = hn::And(hn::BitCast(DI(), x), hn::Set(DI(), 0x7fffffff));
  return hn::RebindMask(DF(), hn::Lt(magnitude, hn::Set(DI(), 0x7f800000)));
}

HWY_INLINE MF not_negative(VF c) { return hn::Ge(c, hn::Zero(DF())); }

HWY_INLINE MF no_lanes() { return hn::MaskFromVec(hn::Zero(DF())); }

// Lanes of a norm block in memory.
HWY_INLINE void add_lanes(float* lanes, size_t k, VF term) {
  hn::Store(hn::Add(hn::Load(DF(), lanes + k * kN), term), DF(), lanes + k * kN);
}

template <bool kL1>
HWY_INLINE VF norm_terms(VF c) {
  if constexpr (kL1) return hn::Abs(c);
  return hn::Mul(c, c);
}

// Everything after the input of the encoder: residual, new c, bits, norm. Returns c.
template <bool kMasked, bool kL1, bool kStream = false>
HWY_INLINE VF accumulate(VF input, VF old, VF scale, VF minus_scale, MF valid, size_t k, float* c,
                         WordBuilder* word, float* lanes) {
  VF value = hn::Add(input, hn::Sub(old, hn::IfThenElse(not_negative(old), scale, minus_scale)));
  if constexpr (kMasked) value = hn::IfThenElseZero(valid, value);
  store_or_stream<kStream>(value, c + k * kN);
  word->add(k, not_negative(value));
  add_lanes(lanes, k, norm_terms<kL1>(value));
  return value;
}

// Valid elements of a group.
HWY_INLINE uint64_t valid_word(const uint8_t* valid, uint64_t bit) {
  return valid != nullptr ? load_bits64(valid, bit) : ~uint64_t{0};
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();

#endif  // SOTTO_SIMD_TARGET
#endif  // per-target guard
