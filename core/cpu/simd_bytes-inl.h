// Vectors of 32-bit codes packed to bytes. Included once per target, like simd-inl.h.
#if defined(SOTTO_CORE_CPU_SIMD_BYTES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SOTTO_CORE_CPU_SIMD_BYTES_INL_H_
#undef SOTTO_CORE_CPU_SIMD_BYTES_INL_H_
#else
#define SOTTO_CORE_CPU_SIMD_BYTES_INL_H_
#endif

#include <type_traits>

#include "core/cpu/simd-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {

// Codes are in the range of Byte, int8_t or uint8_t. Vectors of 8 lanes come in fours.
template <class Byte, size_t kCount, class V>
HWY_INLINE void store_codes(const V (&codes)[kCount], Byte* p) {
#if HWY_TARGET == HWY_AVX2
  static_assert(kCount == 4);
  // Packing works within halves of a vector; the last permutation puts the quarters in order.
  const __m256i low = _mm256_packs_epi32(codes[0].raw, codes[1].raw);
  const __m256i high = _mm256_packs_epi32(codes[2].raw, codes[3].raw);
  const __m256i packed =
      std::is_signed_v<Byte> ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(packed, order));
#else
  const hn::Rebind<Byte, DF> d;
  for (size_t k = 0; k < kCount; ++k)
    hn::StoreU(hn::DemoteTo(d, hn::BitCast(DI(), codes[k])), d, p + k * kN);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
#endif  // per-target guard
