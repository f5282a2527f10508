// Keys of selections, the bits of magnitudes, in vectors. Included once per target, like
// simd-inl.h.
#if defined(SOTTO_CORE_CPU_SIMD_SPARSE_KEYS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SOTTO_CORE_CPU_SIMD_SPARSE_KEYS_INL_H_
#undef SOTTO_CORE_CPU_SIMD_SPARSE_KEYS_INL_H_
#else
#define SOTTO_CORE_CPU_SIMD_SPARSE_KEYS_INL_H_
#endif

#include <algorithm>

#include "core/base/sparse.h"
#include "core/cpu/simd-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {

HWY_INLINE VI magnitudes(VF c) { return hn::And(hn::BitCast(DI(), c), hn::Set(DI(), 0x7fffffff)); }
HWY_INLINE VI sparse_keys(const float* c) { return magnitudes(load(c)); }

// Four vectors of a block; values in registers have names and no numbers.
constexpr uint32_t kQuad = 4 * static_cast<uint32_t>(kN);

// A bit for each lane, the first one's lowest.
template <class D>
HWY_INLINE uint64_t bits_of_mask(D d, hn::Mask<D> mask) {
  alignas(8) uint8_t bytes[8] = {};
  hn::StoreMaskBits(d, mask, bytes);
  uint64_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  return bits;
}

// Lanes whose bits of a byte are ones, the first one's bit lowest; behind them the first.
struct LanesOfBits {
  uint8_t of[256][8] = {};
  constexpr LanesOfBits() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (uint32_t i = 0, n = 0; i < 8; ++i) {
        if ((byte >> i & 1) != 0) of[byte][n++] = static_cast<uint8_t>(i);
      }
    }
  }
};
constexpr LanesOfBits kLanes;

struct SparseQuad {
  VI a, b, c, d;

  static HWY_INLINE SparseQuad keys(VF a, VF b, VF c, VF d) {
    return {magnitudes(a), magnitudes(b), magnitudes(c), magnitudes(d)};
  }
  static HWY_INLINE SparseQuad keys_at(const float* c) {
    return keys(load(c), load(c + kN), load(c + 2 * kN), load(c + 3 * kN));
  }
  HWY_INLINE VI largest() const { return hn::Max(hn::Max(a, b), hn::Max(c, d)); }
  // A bit for each key, the first one's lowest.
  HWY_INLINE uint64_t above(VI bound) const {
    const auto is_a = hn::Gt(a, bound), is_b = hn::Gt(b, bound), is_c = hn::Gt(c, bound),
               is_d = hn::Gt(d, bound);
#if HWY_TARGET == HWY_AVX2
    // Packing works within halves of a vector; the permutation puts the quarters in order.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(is_a.raw, is_b.raw),
                                             _mm256_packs_epi32(is_c.raw, is_d.raw));
    return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_permutevar8x32_epi32(bytes, order)));
#else
    return bits_of_mask(DI(), is_a) | bits_of_mask(DI(), is_b) << kN |
           bits_of_mask(DI(), is_c) << 2 * kN | bits_of_mask(DI(), is_d) << 3 * kN;
#endif
  }
};

// Keys in vectors.
struct SparseKeys {
  alignas(64) int32_t key[kMaxSparseBlock + kN];
  uint32_t count = 0;

  HWY_INLINE VI at(uint32_t i) const { return hn::Load(DI(), key + i); }
  // Behind the last one there are keys that are below all others.
  HWY_INLINE void pad() { hn::StoreU(hn::Set(DI(), -1), DI(), key + count); }

  HWY_INLINE int32_t largest() const {
    VI high = hn::Zero(DI());
    for (uint32_t i = 0; i < count; i += kN) high = hn::Max(high, at(i));
    return hn::GetLane(hn::MaxOfLanes(DI(), high));
  }

  // The largest key that at least k reach, k: 1 to count; or a smaller one that k to `most` reach.
  // low: all reach it. Tried first are four keys that are `step` from each other, `first` and
  // above; then four in the interval that is left. *reached: how many reach the result.
  HWY_INLINE int32_t bound(uint32_t k, uint32_t most, int32_t low, int32_t first, int32_t step,
                           uint32_t* reached) const {
    constexpr uint64_t kNone = uint64_t{1} << 31;  // no key reaches it
    uint64_t edges[6] = {static_cast<uint64_t>(low), 0, 0, 0, 0, kNone};
    uint32_t counts[6] = {count, 0, 0, 0, 0, 0};
    auto next = static_cast<uint64_t>(first), by = static_cast<uint64_t>(step);
    while (counts[0] > most && edges[5] - edges[0] > 1) {
      for (uint32_t i = 1; i < 5; ++i, next += by) edges[i] = std::min(next, edges[5] - 1);
      count_above(edges + 1, counts + 1);
      uint32_t last = 0;
      for (uint32_t i = 1; i < 5; ++i) last += counts[i] >= k ? 1 : 0;
      const uint64_t high = edges[last + 1];
      edges[0] = edges[last];
      counts[0] = counts[last];
      // Nothing may be known above the last one.
      by = high == kNone ? 4 * by : std::max<uint64_t>((high - edges[0]) / 5, 1);
      edges[5] = high;
      next = edges[0] + by;
    }
    *reached = counts[0];
    return static_cast<int32_t>(edges[0]);
  }

  // How many are above a key.
  HWY_INLINE uint32_t above(int32_t bound) const {
    size_t n = 0;
    for (uint32_t i = 0; i < count; i += kN)
      n += hn::CountTrue(DI(), hn::Gt(at(i), hn::Set(DI(), bound)));
    return static_cast<uint32_t>(n);
  }

 private:
  static HWY_INLINE VI below(uint64_t edge) {
    return hn::Set(DI(), static_cast<int32_t>(static_cast<int64_t>(edge) - 1));
  }
  static HWY_INLINE void subtract(VI* sum, VI keys, VI bound) {
    *sum = hn::Sub(*sum, hn::VecFromMask(DI(), hn::Gt(keys, bound)));
  }
  static HWY_INLINE uint32_t total(VI lanes) {
    return static_cast<uint32_t>(hn::GetLane(hn::SumOfLanes(DI(), lanes)));
  }
  // How many reach each of four edges.
  HWY_INLINE void count_above(const uint64_t* edges, uint32_t* counts) const {
    const VI b0 = below(edges[0]), b1 = below(edges[1]), b2 = below(edges[2]), b3 = below(edges[3]);
    VI n0 = hn::Zero(DI()), n1 = n0, n2 = n0, n3 = n0;
    for (uint32_t i = 0; i < count; i += kN) {
      const VI keys = at(i);
      subtract(&n0, keys, b0);
      subtract(&n1, keys, b1);
      subtract(&n2, keys, b2);
      subtract(&n3, keys, b3);
    }
    counts[0] = total(n0);
    counts[1] = total(n1);
    counts[2] = total(n2);
    counts[3] = total(n3);
  }
};

// Elements of c, a vector of them.
HWY_INLINE VF at_places(const float* c, const int32_t* index) {
  if constexpr (kN == 16) return hn::GatherIndex(DF(), c, hn::Load(DI(), index));
  alignas(64) float values[kN];
  HWY_UNROLL(8) for (size_t l = 0; l < kN; ++l) values[l] = c[index[l]];
  return hn::Load(DF(), values);
}

// Stores the chosen lanes; vectors are written. Returns how many they are.
HWY_INLINE uint32_t compress(VI index, VF value, hn::Mask<DI> chosen, uint16_t* indices,
                             float* values) {
  const hn::Rebind<uint16_t, DI> narrow;
  size_t n = 0;
  if constexpr (kN == 16) {
    n = hn::CountTrue(DI(), chosen);
    index = hn::Compress(index, chosen);
    value = hn::Compress(value, hn::RebindMask(DF(), chosen));
  } else {  // Highway's table goes to the stack at each use
    const uint64_t bits = bits_of_mask(DI(), chosen);
    n = hwy::PopCount(bits);
    const auto lanes = hn::PromoteTo(DI(), hn::LoadU(hn::Rebind<uint8_t, DI>(), kLanes.of[bits]));
    index = hn::TableLookupLanes(index, hn::IndicesFromVec(DI(), lanes));
    value = hn::TableLookupLanes(value, hn::IndicesFromVec(DF(), lanes));
  }
  hn::StoreU(hn::DemoteTo(narrow, index), narrow, indices);
  store(value, values);
  return static_cast<uint32_t>(n);
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
#endif  // per-target guard
