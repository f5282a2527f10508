// Vector kernels of selections. The k largest of a block: no element below the k-th largest of the
// maxima of many groups can be one of them, so few elements are looked at twice.
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_sparse.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/ops_sparse.h"
#include "core/cpu/simd-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

HWY_INLINE VI magnitudes(VF c) { return hn::And(hn::BitCast(DI(), c), hn::Set(DI(), 0x7fffffff)); }
HWY_INLINE VI sparse_keys(const float* c) { return magnitudes(load(c)); }

// Keys in vectors.
struct SparseKeys {
  alignas(64) int32_t key[kMaxSparseBlock + kN];
  uint32_t count = 0;

  HWY_INLINE VI at(uint32_t i) const { return hn::Load(DI(), key + i); }
  // Behind the last one there are keys that are below all others.
  HWY_INLINE void pad(int32_t below) { hn::StoreU(hn::Set(DI(), below), DI(), key + count); }

  // The k-th largest; k: 1 to count. Bits below the given one are 0 in the result, so that it may
  // be less.
  HWY_INLINE int32_t largest(uint32_t k, uint32_t last_bit = 1) const {
    VI low = hn::Set(DI(), 0x7fffffff), high = hn::Zero(DI());
    for (uint32_t i = 0; i < count; i += kN) {
      low = hn::Min(low, at(i));
      high = hn::Max(high, at(i));
    }
    // Leading bits that all keys have are those of the result.
    const int32_t first = hn::GetLane(hn::MinOfLanes(DI(), low));
    const int32_t differ = first ^ hn::GetLane(hn::MaxOfLanes(DI(), high));
    if (differ == 0) return first;
    uint32_t bit = uint32_t{1} << log2_floor(static_cast<uint32_t>(differ));
    auto found = static_cast<uint32_t>(first) & ~(2 * bit - 1);
    for (; bit >= last_bit; bit /= 2) {
      found |= above(static_cast<int32_t>((found | bit) - 1)) >= k ? bit : 0;
    }
    return static_cast<int32_t>(found);
  }

  // How many are above a key.
  HWY_INLINE uint32_t above(int32_t bound) const {
    size_t n = 0;
    for (uint32_t i = 0; i < count; i += kN)
      n += hn::CountTrue(DI(), hn::Gt(at(i), hn::Set(DI(), bound)));
    return static_cast<uint32_t>(n);
  }
};

struct VectorSparse {
  using Indices = hn::FixedTag<uint16_t, 8>;

  static void form(const float* x, float* e, float rho, uint32_t n, uint32_t* flags) {
    const VF decay = set(rho);
    MF good = hn::Not(no_lanes());
    uint32_t i = 0;
    for (; i + kN <= n; i += kN) {
      const VF in = load(x + i);
      const MF good_in = finite(in);
      const VF c = hn::Add(hn::Mul(decay, load(e + i)), hn::IfThenElseZero(good_in, in));
      good = hn::And(good, hn::And(good_in, finite(c)));
      store(c, e + i);
    }
    if (!hn::AllTrue(DF(), good)) *flags |= kFlagNonfinite;
    ScalarSparse::form(x + i, e + i, rho, n - i, flags);
  }

  static void scale(float* x, float factor, uint32_t n) {
    const VF by = set(factor);
    uint32_t i = 0;
    for (; i + kN <= n; i += kN) store(hn::Mul(load(x + i), by), x + i);
    ScalarSparse::scale(x + i, factor, n - i);
  }

  // Eight of a byte at once: those that are none are overwritten by the next byte's.
  static uint32_t positions_of_ones(const uint8_t* bytes, uint32_t bits, uint32_t most,
                                    uint16_t* positions) {
    uint32_t i = 0, ones = 0;
    for (; 8 * i + 8 <= bits && ones + 8 <= most; ones += kOnesOfBytes.count[bytes[i]], ++i) {
      const auto all = hn::LoadU(Indices(), kOnesOfBytes.at[bytes[i]]);
      hn::StoreU(hn::Add(all, hn::Set(Indices(), static_cast<uint16_t>(8 * i))), Indices(),
                 positions + ones);
    }
    return ScalarSparse::positions_from(i, ones, bytes, bits, most, positions);
  }

  static void join(const uint16_t* numbers, uint32_t low, uint32_t k, uint16_t* positions) {
    uint32_t j = 0;
    for (; j + 8 <= k; j += 8) {
      const auto upper = hn::Sub(hn::LoadU(Indices(), positions + j),
                                 hn::Iota(Indices(), static_cast<uint16_t>(j)));
      const auto lower = hn::LoadU(Indices(), numbers + j);
      hn::StoreU(hn::Or(hn::ShiftLeftSame(upper, static_cast<int>(low)), lower), Indices(),
                 positions + j);
    }
    for (; j < k; ++j) positions[j] = static_cast<uint16_t>((positions[j] - j) << low | numbers[j]);
  }

  static bool are_ascending(const uint16_t* indices, uint32_t k) {
    auto good = hn::Eq(hn::Zero(Indices()), hn::Zero(Indices()));
    uint32_t j = 1;
    for (; j + 8 <= k; j += 8) {
      good = hn::And(
          good, hn::Gt(hn::LoadU(Indices(), indices + j), hn::LoadU(Indices(), indices + j - 1)));
    }
    return hn::AllTrue(Indices(), good) && ScalarSparse::are_ascending(indices + j - 1, k - j + 1);
  }

  static void select(const float* c, uint32_t m, uint32_t k, uint16_t* indices) {
    if (m % kN != 0) return ScalarSparse::select(c, m, k, indices);
    const int32_t bound = lower_bound(c, m, k);
    alignas(64) int32_t index[kMaxSparseBlock + kN];
    // With a bound of 0 there may be more zeros than all else: these are not looked at.
    const int32_t least = std::max(bound, 1);
    SparseKeys near;
    near.count = collect(c, m, least, index);
    if (near.count < k) return with_zeros(c, k, index, near.count, indices);
    // Behind the last index there are those of elements that do not count.
    for (uint32_t n = 0; n < near.count; n += kN) {
      const VF of_index = hn::GatherIndex(DF(), c, hn::Load(DI(), index + n));
      hn::Store(magnitudes(of_index), DI(), near.key + n);
    }
    near.pad(least - 1);
    const int32_t last = near.largest(k);
    uint32_t equal = k - near.above(last), j = 0;
    if (near.above(last - 1) == k) {
      for (uint32_t n = 0; n < near.count; n += kN) {
        const auto chosen = hn::Gt(near.at(n), hn::Set(DI(), last - 1));
        hn::StoreU(hn::Compress(hn::Load(DI(), index + n), chosen), DI(), index + j);
        j += static_cast<uint32_t>(hn::CountTrue(DI(), chosen));
      }
    } else {
      for (uint32_t n = 0; j < k; ++n) {
        const uint32_t tie = (near.key[n] == last ? 1u : 0u) & (equal != 0 ? 1u : 0u);
        index[j] = index[n];
        j += (near.key[n] > last ? 1u : 0u) | tie;
        equal -= tie;
      }
    }
    for (j = 0; j < k; ++j) indices[j] = static_cast<uint16_t>(index[j]);
  }

 private:
  // Bounds have the upper 7 bits of a mantissa: the elements within 1 % below them are few.
  static constexpr uint32_t kBoundBit = 1u << 16;

  // At least k keys reach it: the k-th largest of the maxima of 4k groups or more.
  static HWY_INLINE int32_t lower_bound(const float* c, uint32_t m, uint32_t k) {
    uint32_t vectors = 1;  // that a group's elements come from, one of each
    while (vectors * 8 * k <= m && vectors * 2 * kN <= m) vectors *= 2;
    SparseKeys maxima;
    for (uint32_t i = 0; i < m; i += vectors * static_cast<uint32_t>(kN), maxima.count += kN) {
      VI largest = sparse_keys(c + i);
      const uint32_t end = std::min(vectors, (m - i) / static_cast<uint32_t>(kN));
      for (uint32_t v = 1; v < end; ++v) largest = hn::Max(largest, sparse_keys(c + i + v * kN));
      hn::Store(largest, DI(), maxima.key + maxima.count);
    }
    return maxima.largest(k, kBoundBit);
  }

  // Elements whose key reaches the bound, in order. Returns how many. A vector behind the last one
  // has indices of c.
  static HWY_INLINE uint32_t collect(const float* c, uint32_t m, int32_t bound, int32_t* index) {
    const VI below = hn::Set(DI(), bound - 1);
    uint32_t count = 0;
    for (uint32_t i = 0; i < m; i += kN) {
      const auto reach = hn::Gt(sparse_keys(c + i), below);
      // Where compressing is a table of permutations, a branch is cheaper.
      if (kN != 16 && hn::AllFalse(DI(), reach)) continue;
      // Compressed in registers: some processors are slow at doing it in memory.
      hn::StoreU(hn::Compress(hn::Iota(DI(), static_cast<int32_t>(i)), reach), DI(), index + count);
      count += static_cast<uint32_t>(hn::CountTrue(DI(), reach));
    }
    hn::StoreU(hn::Zero(DI()), DI(), index + count);
    return count;
  }

  // All `count` elements that are not 0, and as many of the first zeros as make k.
  static HWY_INLINE void with_zeros(const float* c, uint32_t k, const int32_t* index,
                                    uint32_t count, uint16_t* indices) {
    uint32_t zeros = k - count, n = 0;
    for (uint32_t i = 0, j = 0; j < k; ++i) {
      if (zeros == 0) {
        indices[j++] = static_cast<uint16_t>(index[n++]);
      } else if (magnitude_bits(c[i]) == 0) {
        indices[j++] = static_cast<uint16_t>(i);
        --zeros;
      } else {
        indices[j++] = static_cast<uint16_t>(index[n++]);
      }
    }
  }
};

void sparse_encode(const KernelCall& call) { run_sparse_encode<VectorSparse>(call); }
void sparse_mean(const KernelCall& call) { run_sparse_mean<VectorSparse>(call); }

}  // namespace

void install_sparse(KernelTable& table) {
  kernel_entry(table, KernelId::kSparseEncode) = sparse_encode;
  kernel_entry(table, KernelId::kSparseMean) = sparse_mean;
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
