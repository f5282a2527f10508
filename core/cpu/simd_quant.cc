// Vector kernels of casts and of blockwise int8 and int4. Bytes per element: encode with residual
// 12 plus the payload (2, 1.016 or 0.531), without 4 plus it; decode 4 plus it; server 8 plus W + 1
// payloads.
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_quant.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/ops_quant.h"
#include "core/cpu/simd-inl.h"
#include "core/cpu/simd_bytes-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

using D8 = hn::Rebind<int8_t, DF>;
constexpr uint32_t kGroup = 32;  // codes at a time; blocks are multiples of it
constexpr uint32_t kGroupVectors = kGroup / kN;

HWY_INLINE VI magnitude_bits(VF c) {
  return hn::And(hn::BitCast(DI(), c), hn::Set(DI(), 0x7fffffff));
}

// To nearest even, for small x. Highway's own looks at values that no int32 holds.
HWY_INLINE VI nearest(VF x) {
#if HWY_TARGET == HWY_AVX2
  return VI{_mm256_cvtps_epi32(x.raw)};
#else
  return hn::NearestInt(x);
#endif
}

// 16-bit codes and their values.
struct Brain {
  using D16 = hn::Rebind<uint16_t, DF>;
  static HWY_INLINE VF load(const uint8_t* p) {
    const auto codes = hn::LoadU(D16(), reinterpret_cast<const uint16_t*>(p));
    return hn::BitCast(DF(), hn::ShiftLeft<16>(hn::PromoteTo(DU(), codes)));
  }
  // Returns the value; not finite: code and value 0, and a lane of bad.
  static HWY_INLINE VF store(VF c, uint8_t* p, MF* bad) {
    const VU bits = hn::BitCast(DU(), c);
    const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(DU(), 1));
    const VU code = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(DU(), 0x7fff))));
    VF value = hn::BitCast(DF(), hn::ShiftLeft<16>(code));
    const MF good = hn::And(finite(value), hn::Eq(c, c));
    *bad = hn::Or(*bad, hn::Not(good));
    value = hn::IfThenElseZero(good, value);
    const VU kept = hn::ShiftRight<16>(hn::BitCast(DU(), value));
    hn::StoreU(hn::DemoteTo(D16(), hn::BitCast(DI(), kept)), D16(), reinterpret_cast<uint16_t*>(p));
    return value;
  }
};

#if HWY_TARGET <= HWY_AVX2  // conversions in hardware; better targets have smaller numbers
#define SOTTO_QUANT_HALF 1
struct Half {
  using D16 = hn::Rebind<hwy::float16_t, DF>;
  using DU16 = hn::Rebind<uint16_t, DF>;
  static HWY_INLINE VF load(const uint8_t* p) {
    const auto codes = hn::LoadU(DU16(), reinterpret_cast<const uint16_t*>(p));
    return hn::PromoteTo(DF(), hn::BitCast(D16(), codes));
  }
  static HWY_INLINE VF store(VF c, uint8_t* p, MF* bad) {
    VF value = hn::PromoteTo(DF(), hn::DemoteTo(D16(), c));
    const MF good = finite(value);
    *bad = hn::Or(*bad, hn::Not(good));
    value = hn::IfThenElseZero(good, value);
    hn::StoreU(hn::BitCast(DU16(), hn::DemoteTo(D16(), value)), DU16(),
               reinterpret_cast<uint16_t*>(p));
    return value;
  }
};
#else
#define SOTTO_QUANT_HALF 0
#endif

// 32 int4 codes as int8.
HWY_INLINE void unpack_nibbles(const uint8_t* in, int8_t* out) {
  const hn::Full128<uint8_t> d;
  const hn::Full128<uint16_t> d16;
  const auto bytes = hn::LoadU(d, in);
  const auto mask = hn::Set(d, 15);
  const auto high = hn::And(hn::BitCast(d, hn::ShiftRight<4>(hn::BitCast(d16, bytes))), mask);
  const auto low = hn::And(bytes, mask);
  const auto eight = hn::Set(d, 8);
  const auto extend = [&](auto v) HWY_ATTR { return hn::Sub(hn::Xor(v, eight), eight); };
  hn::StoreU(extend(hn::InterleaveLower(d, high, low)), d, reinterpret_cast<uint8_t*>(out));
  hn::StoreU(extend(hn::InterleaveUpper(d, high, low)), d, reinterpret_cast<uint8_t*>(out) + 16);
}

// The opposite.
HWY_INLINE void pack_nibbles(const int8_t* in, uint8_t* out) {
  const hn::Full128<int16_t> d;
  const hn::Full128<uint16_t> du;
  const hn::Full64<uint8_t> d8;
  for (uint32_t half = 0; half < 2; ++half) {
    const auto pairs = hn::LoadU(du, reinterpret_cast<const uint16_t*>(in + 16 * half));
    const auto first = hn::And(hn::ShiftLeft<4>(pairs), hn::Set(du, 0xf0));
    const auto second = hn::And(hn::ShiftRight<8>(pairs), hn::Set(du, 0x0f));
    hn::StoreU(hn::DemoteTo(d8, hn::BitCast(d, hn::Or(first, second))), d8, out + 8 * half);
  }
}

// 32 codes as nibbles.
HWY_INLINE void store_nibbles(const VI (&q)[kGroupVectors], uint8_t* out) {
#if HWY_TARGET == HWY_AVX2
  // Of each pair of 16-bit codes 16 * first + (second & 15), whose low byte is the pair of nibbles.
  const __m256i second = _mm256_set1_epi32(0x000fffff);
  const __m256i weights = _mm256_set1_epi32(0x00010010);
  const __m256i byte = _mm256_set1_epi32(0xff);
  const auto pairs = [&](VI a, VI b) HWY_ATTR {
    const __m256i codes = _mm256_and_si256(_mm256_packs_epi32(a.raw, b.raw), second);
    return _mm256_and_si256(_mm256_madd_epi16(codes, weights), byte);
  };
  const __m256i words = _mm256_packus_epi32(pairs(q[0], q[1]), pairs(q[2], q[3]));
  const __m256i bytes = _mm256_packus_epi16(words, words);
  // Two codes of every quarter of a vector: 0a 1a 2a 3a ... in the lower half, 0b 1b ... above.
  const __m128i low = _mm256_castsi256_si128(bytes);
  const __m128i high = _mm256_extracti128_si256(bytes, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi16(low, high));
#else
  alignas(64) int8_t codes[kGroup];
  store_codes(q, codes);
  pack_nibbles(codes, out);
#endif
}

HWY_INLINE VF load_codes(const int8_t* codes) {
  return hn::ConvertTo(DF(), hn::PromoteTo(DI(), hn::LoadU(D8(), codes)));
}

template <bool kInt4>
HWY_INLINE const int8_t* codes_at(const uint8_t* unit, uint32_t first, int8_t* buffer) {
  if constexpr (!kInt4) return reinterpret_cast<const int8_t*>(unit) + first;
  unpack_nibbles(unit + first / 2, buffer);
  return buffer;
}

struct VectorQuant {
  static HWY_NOINLINE uint32_t add(const float* x, const float* e, float* c, uint64_t n,
                                   uint32_t* flags) {
    const uint64_t whole = n / kN * kN;
    const uint32_t bits = e != nullptr ? add_vectors<true>(x, e, c, whole, flags)
                                       : add_vectors<false>(x, e, c, whole, flags);
    if (whole == n) return bits;
    return std::max(bits, ScalarQuant::add(x + whole, e != nullptr ? e + whole : nullptr, c + whole,
                                           n - whole, flags));
  }

  static HWY_NOINLINE uint32_t largest(const float* x, uint64_t n) {
    VI most[2] = {hn::Zero(DI()), hn::Zero(DI())};
    const uint64_t whole = n / (2 * kN) * (2 * kN);
    for (uint64_t i = 0; i < whole; i += 2 * kN) {
      most[0] = hn::Max(most[0], magnitude_bits(load(x + i)));
      most[1] = hn::Max(most[1], magnitude_bits(load(x + i + kN)));
    }
    const VI bits = hn::MaxOfLanes(DI(), hn::Max(most[0], most[1]));
    return std::max(static_cast<uint32_t>(hn::GetLane(bits)),
                    ScalarQuant::largest(x + whole, n - whole));
  }

  static HWY_NOINLINE void pack_half(CodecKind kind, const float* c, float* error, uint64_t n,
                                     uint8_t* out, uint32_t* flags) {
    if (kind == CodecKind::kBf16) return pack_as<Brain>(kind, c, error, n, out, flags);
#if SOTTO_QUANT_HALF
    pack_as<Half>(kind, c, error, n, out, flags);
#else
    ScalarQuant::pack_half(kind, c, error, n, out, flags);
#endif
  }

  static HWY_NOINLINE void pack_block(CodecKind kind, QuantScale s, const float* c, float* error,
                                      uint32_t block, uint8_t* out) {
    if (!has_vectors(kind)) return ScalarQuant::pack_block(kind, s, c, error, block, out);
    if (s.scale == 0.0f) {
      std::memset(out, 0, kind == CodecKind::kInt8 ? block : block / 2);
      if (error != nullptr && error != c) std::memcpy(error, c, 4 * uint64_t{block});
      return;
    }
    if (kind == CodecKind::kInt8) {
      return error != nullptr ? pack_codes<false, true>(s, c, error, block, out)
                              : pack_codes<false, false>(s, c, error, block, out);
    }
    return error != nullptr ? pack_codes<true, true>(s, c, error, block, out)
                            : pack_codes<true, false>(s, c, error, block, out);
  }

  static HWY_NOINLINE void sum_half(const QuantArgs& a, const uint8_t* rows, uint64_t n,
                                    float* sums) {
    if (a.kind == CodecKind::kBf16) return sum_as<Brain>(a, rows, n, sums);
#if SOTTO_QUANT_HALF
    sum_as<Half>(a, rows, n, sums);
#else
    ScalarQuant::sum_half(a, rows, n, sums);
#endif
  }

  static HWY_NOINLINE void sum_block(const QuantArgs& a, const uint8_t* rows, float* sums) {
    if (!has_vectors(a.kind)) return ScalarQuant::sum_block(a, rows, sums);
    if (a.kind == CodecKind::kInt8) return sum_codes<false>(a, rows, sums);
    sum_codes<true>(a, rows, sums);
  }

  static HWY_NOINLINE void decode_half(CodecKind kind, const uint8_t* codes, uint64_t n, float* y,
                                       bool stream) {
    if (kind == CodecKind::kBf16) return decode_as<Brain>(kind, codes, n, y, stream);
#if SOTTO_QUANT_HALF
    decode_as<Half>(kind, codes, n, y, stream);
#else
    ScalarQuant::decode_half(kind, codes, n, y, stream);
#endif
  }

  static HWY_NOINLINE void decode_block(CodecKind kind, const uint8_t* unit, float scale,
                                        uint32_t first, uint64_t n, float* y, bool stream) {
    if (!has_vectors(kind))
      return ScalarQuant::decode_block(kind, unit, scale, first, n, y, stream);
    // Whole groups from the run's start, which must be a group's.
    const uint64_t groups = first % kGroup == 0 ? n / kGroup * kGroup : 0;
    const auto end = static_cast<uint32_t>(first + groups);
    stream = stream && aligned(y);
    if (kind == CodecKind::kInt8) {
      stream ? decode_groups<false, true>(unit, set(scale), first, end, y)
             : decode_groups<false, false>(unit, set(scale), first, end, y);
    } else {
      stream ? decode_groups<true, true>(unit, set(scale), first, end, y)
             : decode_groups<true, false>(unit, set(scale), first, end, y);
    }
    ScalarQuant::decode_block(kind, unit, scale, end, n - groups, y + groups, false);
  }
  static void finish_streams() { hwy::FlushStream(); }

 private:
  // Integers of other sizes are done one by one.
  static bool has_vectors(CodecKind kind) {
    return kind == CodecKind::kInt8 || kind == CodecKind::kInt4;
  }
  static bool aligned(const float* y) {
    return reinterpret_cast<uintptr_t>(y) % (kN * sizeof(float)) == 0;
  }
  template <bool kStream>
  static HWY_INLINE void put(VF v, float* y) {
    if constexpr (kStream) {
      hn::Stream(v, DF(), y);
    } else {
      store(v, y);
    }
  }

  template <bool kInt4, bool kError>
  static HWY_INLINE void pack_codes(QuantScale s, const float* c, float* error, uint32_t block,
                                    uint8_t* out) {
    const VF scale = set(s.scale);
    const VF inverse = set(s.inverse);
    for (uint32_t i = 0; i < block; i += kGroup) {
      VI q[kGroupVectors];
      HWY_UNROLL(8) for (uint32_t k = 0; k < kGroupVectors; ++k) {
        const VF value = load(c + i + k * kN);
        q[k] = nearest(hn::Mul(value, inverse));
        if constexpr (kError) {
          store(hn::Sub(value, hn::Mul(hn::ConvertTo(DF(), q[k]), scale)), error + i + k * kN);
        }
      }
      if constexpr (kInt4) {
        store_nibbles(q, out + i / 2);
      } else {
        store_codes(q, reinterpret_cast<int8_t*>(out) + i);
      }
    }
  }

  template <bool kError>
  static HWY_INLINE uint32_t add_vectors(const float* x, const float* e, float* c, uint64_t n,
                                         uint32_t* flags) {
    VI largest = hn::Zero(DI());
    MF bad = no_lanes();
    for (uint64_t i = 0; i < n; i += kN) {
      const VF input = load(x + i);
      const MF good = finite(input);
      VF value = hn::IfThenElseZero(good, input);
      if constexpr (kError) value = hn::Add(value, load(e + i));
      store(value, c + i);
      largest = hn::Max(largest, magnitude_bits(value));
      bad = hn::Or(bad, hn::Not(good));
    }
    if (!hn::AllFalse(DF(), bad)) *flags |= kFlagNonfinite;
    return static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(DI(), largest)));
  }

  template <class Type>
  static HWY_INLINE void pack_as(CodecKind kind, const float* c, float* error, uint64_t n,
                                 uint8_t* out, uint32_t* flags) {
    MF bad = no_lanes();
    uint64_t i = 0;
    for (; i + kN <= n; i += kN) {
      const VF value = load(c + i);
      const VF kept = Type::store(value, out + 2 * i, &bad);
      if (error != nullptr) store(hn::Sub(value, kept), error + i);
    }
    if (!hn::AllFalse(DF(), bad)) *flags |= kFlagNonfinite;
    if (i == n) return;
    ScalarQuant::pack_half(kind, c + i, error != nullptr ? error + i : nullptr, n - i, out + 2 * i,
                           flags);
  }

  template <class Type>
  static HWY_INLINE void sum_as(const QuantArgs& a, const uint8_t* rows, uint64_t n, float* sums) {
    const VF part = set(1.0f / static_cast<float>(a.world));
    uint64_t i = 0;
    for (; i + kN <= n; i += kN) {
      VF total = hn::Zero(DF());
      for (uint32_t group = 0; group < a.world; group += 8) {
        VF partial = hn::Zero(DF());
        for (uint32_t r = group; r < std::min(a.world, group + 8); ++r) {
          partial = hn::Add(partial, hn::Mul(Type::load(rows + r * a.row_bytes + 2 * i), part));
        }
        total = hn::Add(total, partial);
      }
      store(total, sums + i);
    }
    if (i != n) ScalarQuant::sum_half(a, rows + 2 * i, n - i, sums + i);
  }

  template <class Type>
  static HWY_INLINE void decode_as(CodecKind kind, const uint8_t* codes, uint64_t n, float* y,
                                   bool stream) {
    uint64_t i = 0;
    if (stream && aligned(y)) {
      for (; i + kN <= n; i += kN) put<true>(Type::load(codes + 2 * i), y + i);
    } else {
      for (; i + kN <= n; i += kN) put<false>(Type::load(codes + 2 * i), y + i);
    }
    if (i != n) ScalarQuant::decode_half(kind, codes + 2 * i, n - i, y + i, false);
  }

  template <bool kInt4>
  static HWY_INLINE void sum_codes(const QuantArgs& a, const uint8_t* rows, float* sums) {
    const PayloadUnit unit = payload_unit(a.kind, a.block);
    const float part = 1.0f / static_cast<float>(a.world);
    alignas(64) int8_t buffer[kGroup];
    for (uint32_t group = 0; group < a.world; group += 8) {
      const uint32_t ranks = std::min(a.world - group, 8u);
      const uint8_t* row[8];
      float terms[8];
      for (uint32_t r = 0; r < ranks; ++r) {
        row[r] = rows + (group + r) * a.row_bytes;
        terms[r] = stored_scale(row[r], unit) * part;
      }
      for (uint32_t i = 0; i < a.block; i += kGroup) {
        VF sum[kGroupVectors];
        HWY_UNROLL(8) for (uint32_t k = 0; k < kGroupVectors; ++k) sum[k] = hn::Zero(DF());
        for (uint32_t r = 0; r < ranks; ++r) {
          const int8_t* codes = codes_at<kInt4>(row[r], i, buffer);
          const VF term = set(terms[r]);
          HWY_UNROLL(8)
          for (uint32_t k = 0; k < kGroupVectors; ++k)
            sum[k] = hn::Add(sum[k], hn::Mul(load_codes(codes + k * kN), term));
        }
        HWY_UNROLL(8) for (uint32_t k = 0; k < kGroupVectors; ++k) {
          float* at = sums + i + k * kN;
          store(group == 0 ? sum[k] : hn::Add(load(at), sum[k]), at);
        }
      }
    }
  }

  template <bool kInt4, bool kStream>
  static HWY_INLINE void decode_groups(const uint8_t* unit, VF scale, uint32_t first, uint32_t end,
                                       float* y) {
    alignas(64) int8_t buffer[kGroup];
    for (uint32_t i = first; i < end; i += kGroup, y += kGroup) {
      const int8_t* codes = codes_at<kInt4>(unit, i, buffer);
      HWY_UNROLL(8)
      for (uint32_t k = 0; k < kGroupVectors; ++k)
        put<kStream>(hn::Mul(load_codes(codes + k * kN), scale), y + k * kN);
    }
  }
};

void quant_encode(const KernelCall& call) { run_quant_encode<VectorQuant>(call); }
void quant_server(const KernelCall& call) { run_quant_server<VectorQuant>(call); }
void quant_decode(const KernelCall& call) { run_quant_decode<VectorQuant>(call); }

}  // namespace

void install_quant(KernelTable& table) {
  kernel_entry(table, KernelId::kQuantEncode) = quant_encode;
  kernel_entry(table, KernelId::kQuantServer) = quant_server;
  kernel_entry(table, KernelId::kQuantDecode) = quant_decode;
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
