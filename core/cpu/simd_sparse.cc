// Vector kernels of selections. The k largest of a block: elements that reach a bound are marked
// while c is formed, and only these are looked at again. The bound is guessed from the block
// before, also that of the call before. Where fewer than k elements or very many reach it, it is
// the k-th largest of the maxima of many groups, below which none of the k largest can be.
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_sparse.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/ops_sparse.h"
#include "core/cpu/simd-inl.h"
#include "core/cpu/simd_sparse_keys-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

// Bits of a byte, the lowest first, as the lower bits of pairs in two bytes, the highest first.
struct BitPairs {
  uint16_t of[256] = {};
  constexpr BitPairs() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (uint32_t i = 0; i < 8; ++i)
        of[byte] = static_cast<uint16_t>(of[byte] | (byte >> i & 1) << (i / 4 * 8 + 6 - i % 4 * 2));
    }
  }
};
constexpr BitPairs kPairs;

// The codes of a byte.
struct FourCodes {
  int32_t of[256][4] = {};
  constexpr FourCodes() {
    for (int32_t byte = 0; byte < 256; ++byte) {
      for (int32_t i = 0; i < 4; ++i) of[byte][i] = byte >> (6 - 2 * i) & 3;
    }
  }
};
constexpr FourCodes kFourCodes;

// How eight numbers of a few bits each come out of as many bytes: lanes get the two bytes that a
// number lies in, and it is shifted up in them.
constexpr uint32_t kUnpackBits = 9;  // that two bytes hold at any bit of the first
struct alignas(16) Unpack {
  uint8_t order[16] = {};
  uint16_t factor[8] = {};
  constexpr Unpack(uint32_t low) {
    for (uint32_t l = 0; l < 8; ++l) {
      order[2 * l + 1] = static_cast<uint8_t>(l * low / 8);
      order[2 * l] = static_cast<uint8_t>(l * low / 8 + 1);
      factor[l] = static_cast<uint16_t>(low == 0 ? 0 : 1u << l * low % 8);
    }
  }
};
constexpr Unpack kUnpack[kUnpackBits + 1] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};

constexpr int32_t kNoGuess = 0x7fffffff;  // nothing reaches it
struct SparseGuess {
  int32_t key = kNoGuess;    // that a few more than k are to reach
  int32_t margin = 1 << 20;  // from the k-th largest key down to it
};
// What the call before has ended with: it was of the same tensor, as a rule. Any guess gives the
// same selection.
thread_local SparseGuess last_guess;

class VectorSparse {
 public:
  using Indices = hn::FixedTag<uint16_t, 8>;

  VectorSparse() = default;
  ~VectorSparse() { last_guess = {guess_, margin_}; }
  VectorSparse(const VectorSparse&) = delete;
  VectorSparse& operator=(const VectorSparse&) = delete;

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

  void choose(const SparseBlock& b, const float* x, float* e, float rho, SparseChoice* s,
              uint32_t* flags) {
    next_x_ = x + b.m + kAhead;
    next_e_ = e + b.m + kAhead;
    if (b.m % kQuad == 0) {
      form_and_mark(x, e, rho, b.m, flags);
      return select(e, b.m, b.k, s);
    }
    // Zeros behind the last element are never chosen.
    alignas(64) float x_room[kMaxSparseBlock], c_room[kMaxSparseBlock];
    const uint32_t m = (b.m + kQuad - 1) / kQuad * kQuad;
    std::memcpy(x_room, x, b.m * sizeof *x);
    std::memcpy(c_room, e, b.m * sizeof *e);
    std::fill(x_room + b.m, x_room + m, 0.0f);
    std::fill(c_room + b.m, c_room + m, 0.0f);
    form_and_mark(x_room, c_room, rho, m, flags);
    std::memcpy(e, c_room, b.m * sizeof *e);
    select(c_room, m, b.k, s);
  }

  // As the reference does it, but eight values at a time; zeros that fill up the last eight add
  // nothing to sums.
  static void write_two_bits(const SparseBlock& b, SparseChoice* s, uint8_t* codes,
                             uint32_t* flags) {
    const uint32_t end = (b.k + 7) / 8 * 8;
    float* const v = s->values;
    std::fill(v + b.k, v + end, 0.0f);
    size_t zeros = 0;
    for (uint32_t j = 0; j < end; j += kValues)
      zeros += hn::CountTrue(Values(), hn::Eq(hn::LoadU(Values(), v + j), hn::Zero(Values())));
    const auto all = hn::Eq(hn::Zero(Values()), hn::Zero(Values()));
    const SparseSplit split(sum_where(v, end, [&](auto) HWY_ATTR { return all; }), b.k,
                            zeros > end - b.k);
    const auto threshold = hn::Set(Values(), split.threshold);
    const auto high = [&](auto a) HWY_ATTR { return hn::Gt(a, threshold); };
    const auto not_high = [&](auto a) HWY_ATTR { return hn::Not(hn::Gt(a, threshold)); };
    size_t n_high = 0;
    for (uint32_t j = 0; j < end; j += kValues)
      n_high += hn::CountTrue(Values(), high(hn::Abs(hn::LoadU(Values(), v + j))));
    const SparseLevels levels =
        SparseLevels::of_groups(sum_where(v, end, not_high), sum_where(v, end, high), b.k,
                                static_cast<uint32_t>(n_high), flags);
    const auto lo = hn::Set(Values(), levels.lo), hi = hn::Set(Values(), levels.hi);
    for (uint32_t first = 0; first < end; first += 8) {
      uint32_t high_bits = 0, positive_bits = 0;
      HWY_UNROLL(4) for (uint32_t l = 0; l < 8; l += kValues) {
        const auto value = hn::LoadU(Values(), v + first + l);
        const auto is_high = high(hn::Abs(value)), positive = hn::Ge(value, hn::Zero(Values()));
        const auto magnitude = hn::IfThenElse(is_high, hi, lo);
        hn::StoreU(hn::IfThenElse(positive, magnitude, hn::Neg(magnitude)), Values(),
                   s->decoded + first + l);
        high_bits |= static_cast<uint32_t>(bits_of_mask(Values(), is_high)) << l;
        positive_bits |= static_cast<uint32_t>(bits_of_mask(Values(), positive)) << l;
      }
      const uint32_t valid = b.k - first < 8 ? (1u << (b.k - first)) - 1 : 0xff;
      const auto both =
          static_cast<uint16_t>(kPairs.of[positive_bits & valid] << 1 | kPairs.of[high_bits]);
      std::memcpy(codes + first / 4, &both, b.k - first > 4 ? 2 : 1);
    }
    store_word(codes + b.code_bytes, levels.stored);
  }

  static bool finish(float* sums, float factor, uint32_t n, uint64_t at, float* y) {
    if (n % kN != 0) return ScalarSparse::finish(sums, factor, n, at, y);
    const bool stream = streams(at, y);
    stream ? finish_vectors<true>(sums, factor, n, y) : finish_vectors<false>(sums, factor, n, y);
    return stream;
  }
  static void finish_streams() { hwy::FlushStream(); }

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

  static bool elias_fano(const SparseBlock& b, const uint8_t* payload, uint16_t* indices) {
    const uint32_t bits = b.k + ((b.m - 1) >> b.low);
    if (positions_of_ones(payload + b.low_bytes, bits, b.k, indices) != b.k) return false;
    const hn::Full128<int16_t> d;
    auto before = hn::Set(d, -1);
    auto good = hn::Eq(before, before);
    uint32_t j = 0;
    if (b.low <= kUnpackBits) {
      const Unpack& unpack = kUnpack[b.low];
      const auto order = hn::Load(hn::Full128<uint8_t>(), unpack.order);
      const auto factor = hn::Load(Indices(), unpack.factor);
      for (; j + 8 <= b.k && j * b.low / 8 + 16 <= b.bytes(); j += 8) {
        const auto bytes = hn::LoadU(hn::Full128<uint8_t>(), payload + j * b.low / 8);
        const auto windows = hn::BitCast(Indices(), hn::TableLookupBytes(bytes, order));
        const auto lower =
            hn::ShiftRightSame(hn::Mul(windows, factor), static_cast<int>(16 - b.low));
        const auto upper = hn::Sub(hn::LoadU(Indices(), indices + j),
                                   hn::Iota(Indices(), static_cast<uint16_t>(j)));
        const auto index = hn::Or(hn::ShiftLeftSame(upper, static_cast<int>(b.low)), lower);
        hn::StoreU(index, Indices(), indices + j);
        const auto now = hn::BitCast(d, index);
        good = hn::And(good, hn::Gt(now, hn::CombineShiftRightBytes<14>(d, now, before)));
        before = now;
      }
    }
    int32_t last = j == 0 ? -1 : indices[j - 1];
    bool rest = true;
    for (; j < b.k; ++j) {
      indices[j] = static_cast<uint16_t>((indices[j] - j) << b.low | number_at(payload, b.low, j));
      rest &= indices[j] > last;
      last = indices[j];
    }
    return rest && hn::AllTrue(d, good) && indices[b.k - 1] < b.m;
  }

  static void two_bit_values(const float* of_code, const uint8_t* codes, uint32_t k, float* q) {
    const hn::FixedTag<float, 4> d;
    const hn::FixedTag<int32_t, 4> places;
    const auto table = hn::LoadU(d, of_code);
    uint32_t j = 0;
    for (; j + 4 <= k; j += 4) {
      const auto code = hn::IndicesFromVec(d, hn::LoadU(places, kFourCodes.of[codes[j / 4]]));
      hn::StoreU(hn::TableLookupLanes(table, code), d, q + j);
    }
    ScalarSparse::two_bit_values(of_code, codes + j / 4, k - j, q + j);
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

 private:
  // Lanes of sums are float64, all eight or a part of them.
  using Sums = hn::CappedTag<double, 8>;
  using Values = hn::Rebind<float, Sums>;
  static constexpr uint32_t kValues = static_cast<uint32_t>(hn::MaxLanes(Sums()));

  template <bool kStream>
  static HWY_INLINE void finish_vectors(float* sums, float factor, uint32_t n, float* y) {
    const VF by = set(factor);
    for (uint32_t i = 0; i < n; i += kN) {
      store_or_stream<kStream>(hn::Mul(load(sums + i), by), y + i);
      store(hn::Zero(DF()), sums + i);
    }
  }

  // Of magnitudes where which() says so, n of them, a multiple of 8.
  template <class Which>
  static HWY_INLINE double sum_where(const float* v, uint32_t n, Which&& which) {
    alignas(64) double lanes[8];
    HWY_UNROLL(4) for (uint32_t l = 0; l < 8; l += kValues) {
      auto sum = hn::Zero(Sums());
      for (uint32_t j = l; j < n; j += 8) {
        const auto a = hn::Abs(hn::LoadU(Values(), v + j));
        sum = hn::Add(sum, hn::PromoteTo(Sums(), hn::IfThenElseZero(which(a), a)));
      }
      hn::Store(sum, Sums(), lanes + l);
    }
    return fold_sum(lanes);
  }

  // Into the second cache: the first one holds the block that is selected, and has fewer lines on
  // their way at a time.
  static HWY_INLINE void prefetch(const float* line) { __builtin_prefetch(line, 0, 2); }

  // Asks for lines of the next block while this one is selected.
  HWY_INLINE void ask(uint32_t lines) {
    for (uint32_t l = 0; l < lines; ++l, next_x_ += 16, next_e_ += 16) {
      prefetch(next_x_);
      prefetch(next_e_);
    }
  }

  // Elements from one that is read to what is asked for: the processor does not read on by itself
  // while a block is selected.
  static constexpr uint32_t kAhead = 1024;

  // e becomes c. Marks what reaches the guess.
  HWY_INLINE void form_and_mark(const float* x, float* e, float rho, uint32_t m, uint32_t* flags) {
    const VF decay = set(rho);
    const VI below = hn::Set(DI(), guess_ - 1);
    const VI finite = hn::Set(DI(), 0x7f7fffff);
    auto* marks = reinterpret_cast<uint8_t*>(marks_);
    for (const float* const end = x + m; x != end; x += kQuad, e += kQuad, marks += kQuad / 8) {
      for (uint32_t l = 0; l < kQuad; l += 16) {  // by lines of the cache
        prefetch(x + l + kAhead);
        prefetch(e + l + kAhead);
      }
      const VF c0 = sum_at(x, e, decay), c1 = sum_at(x + kN, e + kN, decay),
               c2 = sum_at(x + 2 * kN, e + 2 * kN, decay),
               c3 = sum_at(x + 3 * kN, e + 3 * kN, decay);
      SparseQuad keys = SparseQuad::keys(c0, c1, c2, c3);
      // c is finite only where x is.
      if (HWY_LIKELY(hn::AllFalse(DI(), hn::Gt(keys.largest(), finite)))) {
        store(c0, e);
        store(c1, e + kN);
        store(c2, e + 2 * kN);
        store(c3, e + 3 * kN);
      } else {
        ScalarSparse::form(x, e, rho, kQuad, flags);
        keys = SparseQuad::keys_at(e);
      }
      const uint64_t bits = keys.above(below);
      std::memcpy(marks, &bits, kQuad / 8);
    }
  }
  static HWY_INLINE VF sum_at(const float* x, const float* e, VF decay) {
    return hn::Add(hn::Mul(decay, load(e)), load(x));
  }

  HWY_INLINE void store_marks(uint64_t bits, uint32_t i) {
    std::memcpy(reinterpret_cast<uint8_t*>(marks_) + i / 8, &bits, kQuad / 8);
  }

  // Marks what reaches the bound.
  HWY_NOINLINE void mark(const float* c, uint32_t m, int32_t bound) {
    const VI below = hn::Set(DI(), bound - 1);
    for (uint32_t i = 0; i < m; i += kQuad) store_marks(SparseQuad::keys_at(c + i).above(below), i);
  }

  HWY_INLINE uint32_t count_marks(uint32_t m) {
    if (m % 64 != 0) marks_[m / 64] &= (uint64_t{1} << m % 64) - 1;
    size_t n = 0;
    for (uint32_t w = 0; w < (m + 63) / 64; ++w) n += hwy::PopCount(marks_[w]);
    return static_cast<uint32_t>(n);
  }

  // Places of the marks, in order; behind them as many as make a vector, that are places of c.
  HWY_INLINE void list_marks(uint32_t m, int32_t* index) {
    constexpr uint64_t kLast = uint64_t{1} << 63;  // listed where there is no mark
    uint32_t n = 0;
    for (uint32_t w = 0; w < (m + 63) / 64; ++w) {
      ask(2);
      uint64_t word = marks_[w];
      const auto ones = static_cast<uint32_t>(hwy::PopCount(word));
      const auto first = static_cast<int32_t>(64 * w);
      int32_t* to = index + n;
      n += ones;
      for (int32_t* const end = to + ones;; to += 4) {
        HWY_UNROLL(4) for (uint32_t l = 0; l < 4; ++l) {
          to[l] = first + static_cast<int32_t>(std::countr_zero(word | kLast));
          word &= word - 1;
        }
        if (HWY_LIKELY(to + 4 >= end)) break;
      }
    }
    hn::StoreU(hn::Zero(DI()), DI(), index + n);
  }

  // Distance of the next guess from the k-th largest key, which `wanted` elements are to reach.
  static HWY_INLINE int32_t adapted(int32_t margin, uint32_t count, uint32_t k, uint32_t wanted) {
    int32_t next = count < wanted ? margin + margin / 16 : margin - margin / 16;
    if (count < k) next = margin * 2;
    if (count > 2 * wanted) next = margin / 2;
    return std::clamp(next, 16, 1 << 24);
  }

  HWY_INLINE void select(const float* c, uint32_t m, uint32_t k, SparseChoice* s) {
    uint32_t count = count_marks(m);
    int32_t least = guess_;
    const uint32_t wanted = k + k / 4 + 8;
    if (guess_ != kNoGuess) margin_ = adapted(margin_, count, k, wanted);
    if (count < k || count > 2 * k + 128) {
      // With a bound of 0 there may be more zeros than all else: these are not looked at.
      least = std::max(lower_bound(c, m, k), 1);
      mark(c, m, least);
      count = count_marks(m);
    }
    alignas(64) int32_t index[kMaxSparseBlock + kN];
    alignas(64) float value[kMaxSparseBlock + kN];
    list_marks(m, index);
    if (count < k) {
      with_zeros(c, k, index, count, s->indices);
      for (uint32_t j = 0; j < k; ++j) s->values[j] = c[s->indices[j]];
      return;
    }
    SparseKeys near;
    near.count = count;
    for (uint32_t n = 0; n < count; n += kN) {
      ask(2);
      const VF of_index = at_places(c, index + n);
      hn::Store(of_index, DF(), value + n);
      hn::Store(magnitudes(of_index), DI(), near.key + n);
    }
    near.pad();
    uint32_t reached;
    // The k-th largest is about as far above the guess as in the block before.
    const int32_t eighth = margin_ / 8;
    const int32_t last = near.bound(k, k, least, std::min(least, kNoGuess - margin_) + 5 * eighth,
                                    2 * eighth, &reached);
    guess_ = std::max(last - margin_, 1);
    uint32_t j = 0;
    if (reached == k) {
      for (uint32_t n = 0; n < count; n += kN) {
        const auto chosen = hn::Gt(near.at(n), hn::Set(DI(), last - 1));
        j += compress(hn::Load(DI(), index + n), hn::Load(DF(), value + n), chosen, s->indices + j,
                      s->values + j);
      }
      return;
    }
    uint32_t equal = k - near.above(last);
    for (uint32_t n = 0; j < k; ++n) {
      const uint32_t tie = (near.key[n] == last ? 1u : 0u) & (equal != 0 ? 1u : 0u);
      s->indices[j] = static_cast<uint16_t>(index[n]);
      s->values[j] = value[n];
      j += (near.key[n] > last ? 1u : 0u) | tie;
      equal -= tie;
    }
  }

  // At least k keys reach it: the k-th largest of the maxima of 4k groups or more.
  HWY_INLINE int32_t lower_bound(const float* c, uint32_t m, uint32_t k) {
    SparseKeys maxima;
    uint32_t reached;
    if (16 * k > m) {
      for (uint32_t i = 0; i < m; i += kN) hn::Store(sparse_keys(c + i), DI(), maxima.key + i);
      maxima.count = m;
    } else {
      uint32_t quads = 1;  // of a group, one lane of each
      while (quads * 32 * k <= m) quads *= 2;
      const uint32_t rows = m / kQuad;
      for (uint32_t r = 0; r < rows; r += quads, maxima.count += kN) {
        VI largest = SparseQuad::keys_at(c + r * kQuad).largest();
        for (uint32_t q = r + 1; q < std::min(r + quads, rows); ++q)
          largest = hn::Max(largest, SparseQuad::keys_at(c + q * kQuad).largest());
        hn::Store(largest, DI(), maxima.key + maxima.count);
      }
    }
    // A quarter of the largest first.
    const int32_t quarter = std::max(maxima.largest() - (1 << 24), 1);
    return maxima.bound(k, k + k / 8, 0, quarter, 1 << 22, &reached);
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

  int32_t guess_ = last_guess.key;
  int32_t margin_ = last_guess.margin;
  const float* next_x_ = nullptr;  // asked for next
  const float* next_e_ = nullptr;
  alignas(64) uint64_t marks_[kMaxSparseBlock / 64 + 1] = {};
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
