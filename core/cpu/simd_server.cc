// Vector server of the 1-bit codec: 8.125 + W / 8 bytes per element, so arithmetic per rank decides
// its speed.
//
// Bits of four ranks are brought together as one nibble per element. The nibble chooses among the
// 16 sums of the first four ranks of a group of eight; of the second four, each bit of the nibble
// chooses the term to add. All sums are made by the additions of ServerOp::sum in their order, so
// the result has its bits.
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_server.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/ops_onebit.h"
#include "core/cpu/simd-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

#if HWY_TARGET <= HWY_AVX2  // lookups in 8 lanes; better targets have smaller numbers
#define SOTTO_SIMD_LOOKUP 1
#else
#define SOTTO_SIMD_LOOKUP 0
#endif

constexpr uint32_t kMaxRanks = 4096;       // more are left to the reference
constexpr uint64_t kBlockElements = 1024;  // sums of a block stay in L1

#if SOTTO_SIMD_LOOKUP

constexpr uint32_t kGroupRanks = 8;
using D8 = hn::CappedTag<float, 8>;
using DU8 = hn::CappedTag<uint32_t, 8>;
using V8 = hn::Vec<D8>;
using VU8 = hn::Vec<DU8>;

// Sums and terms of one group of eight ranks.
struct RankGroup {
  alignas(32) float low[8];       // sum of ranks 0 - 3 by nibble, bit 3 (rank 3) clear
  alignas(32) float high[8];      // the same, set
  alignas(32) float terms[3][8];  // +-t of ranks 4 - 6 by nibble
  float last;                     // t of rank 7
  uint32_t ranks;
};

// Terms of ranks first .. first + ranks - 1.
void fill_group(const ServerOp& op, const Piece& p, uint32_t first, RankGroup* out) {
  out->ranks = std::min(op.args.world - first, kGroupRanks);
  float t[kGroupRanks] = {};
  for (uint32_t r = 0; r < out->ranks; ++r) t[r] = op.term(first + r, p);
  for (uint32_t nibble = 0; nibble < 16; ++nibble) {
    float sum = 0.0f;
    for (uint32_t r = 0; r < std::min(out->ranks, 4u); ++r)
      sum += plus_minus(nibble >> r & 1, t[r]);
    (nibble < 8 ? out->low : out->high)[nibble % 8] = sum;
  }
  for (uint32_t r = 0; r < 3; ++r) {
    for (uint32_t nibble = 0; nibble < 8; ++nibble) {
      out->terms[r][nibble] = plus_minus(nibble >> r & 1, t[4 + r]);
    }
  }
  out->last = t[7];
}

// Brings the bits of four rows together: word k has a nibble for each of the elements 8k .. 8k + 7,
// row r in its bit r. The nibble of element i lies at bit kNibbleShift[i % 8]. n: groups of 64
// elements.
HWY_NOINLINE void gather_nibbles(const uint8_t* const* rows, uint64_t n, uint32_t* words) {
  const hn::Full128<uint8_t> d8;
  const hn::Full128<uint16_t> d16;
  const hn::Full128<uint32_t> d32;
  const hn::Full128<uint64_t> d64;
  const DU8 d;
  for (uint64_t byte = 0; byte < 8 * n; byte += 8, words += 8) {
    const auto bytes_of = [&](uint32_t r) HWY_ATTR {
      uint64_t word;
      std::memcpy(&word, rows[r] + byte, 8);
      return hn::BitCast(d8, hn::Set(d64, word));
    };
    const auto rows01 = hn::BitCast(d16, hn::InterleaveLower(d8, bytes_of(0), bytes_of(1)));
    const auto rows23 = hn::BitCast(d16, hn::InterleaveLower(d8, bytes_of(2), bytes_of(3)));
    VU8 x = hn::Combine(d, hn::BitCast(d32, hn::InterleaveUpper(d16, rows01, rows23)),
                        hn::BitCast(d32, hn::InterleaveLower(d16, rows01, rows23)));
    // Bit address (row high, row low, column high, middle, low) -> (middle, low, high, row high,
    // row low): two exchanges of address bits, each a swap of bits that lie a fixed distance apart.
    VU8 t = hn::And(hn::Xor(x, hn::ShiftRight<7>(x)), hn::Set(d, 0x00aa00aau));
    x = hn::Xor(x, hn::Xor(t, hn::ShiftLeft<7>(t)));
    t = hn::And(hn::Xor(x, hn::ShiftRight<14>(x)), hn::Set(d, 0x0000ccccu));
    x = hn::Xor(x, hn::Xor(t, hn::ShiftLeft<14>(t)));
    hn::Store(x, d, words);
  }
}

alignas(32) constexpr uint32_t kNibbleShift[8] = {28, 20, 12, 4, 24, 16, 8, 0};

// Lane i: yes or no by bit 3 of its nibble, which a shift brings to the sign.
HWY_INLINE V8 by_bit_3(VU8 nibbles, V8 yes, V8 no) {
  return hn::IfThenElse(hn::MaskFromVec(hn::BitCast(D8(), hn::ShiftLeft<28>(nibbles))), yes, no);
}

// Adds one group of ranks to the sums of n groups of elements; kSecond: ranks after the fourth.
template <uint32_t kSecond, bool kFirst>
HWY_NOINLINE void add_ranks(const RankGroup& g, const uint32_t* first, const uint32_t* second,
                            uint64_t n, float* sums) {
  const D8 d;
  const DU8 du;
  const VU8 shift = hn::Load(du, kNibbleShift);
  const VU8 seven = hn::Set(du, 7);
  const V8 low = hn::Load(d, g.low);
  const V8 high = hn::Load(d, g.high);
  const V8 term4 = hn::Load(d, g.terms[0]);
  const V8 term5 = hn::Load(d, g.terms[1]);
  const V8 term6 = hn::Load(d, g.terms[2]);
  const V8 last = hn::Set(d, g.last);
  const V8 minus_last = hn::Neg(last);
  for (uint64_t k = 0; k < 8 * n; ++k) {
    const VU8 nibble = hn::Shr(hn::Set(du, first[k]), shift);
    const auto index = hn::IndicesFromVec(d, hn::And(nibble, seven));
    V8 sum = by_bit_3(nibble, hn::TableLookupLanes(high, index), hn::TableLookupLanes(low, index));
    if constexpr (kSecond > 0) {
      const VU8 more = hn::Shr(hn::Set(du, second[k]), shift);
      const auto bits = hn::IndicesFromVec(d, hn::And(more, seven));
      sum = hn::Add(sum, hn::TableLookupLanes(term4, bits));
      if constexpr (kSecond > 1) sum = hn::Add(sum, hn::TableLookupLanes(term5, bits));
      if constexpr (kSecond > 2) sum = hn::Add(sum, hn::TableLookupLanes(term6, bits));
      if constexpr (kSecond > 3) sum = hn::Add(sum, by_bit_3(more, last, minus_last));
    }
    float* total = sums + 8 * k;
    hn::Store(kFirst ? sum : hn::Add(hn::Load(d, total), sum), d, total);
  }
}

template <bool kFirst>
void add_group(const RankGroup& g, const uint8_t* rows, uint64_t row_bytes, uint64_t n,
               float* sums) {
  alignas(32) uint32_t first[kBlockElements / 8], second[kBlockElements / 8];
  // Rows that are not there: any will do, their bits choose among equal sums.
  const uint8_t* row[kGroupRanks];
  for (uint32_t r = 0; r < kGroupRanks; ++r) row[r] = rows + (r < g.ranks ? r : 0) * row_bytes;
  gather_nibbles(row, n, first);
  if (g.ranks > 4) gather_nibbles(row + 4, n, second);
  switch (g.ranks) {
    case 5: return add_ranks<1, kFirst>(g, first, second, n, sums);
    case 6: return add_ranks<2, kFirst>(g, first, second, n, sums);
    case 7: return add_ranks<3, kFirst>(g, first, second, n, sums);
    case 8: return add_ranks<4, kFirst>(g, first, second, n, sums);
    default: return add_ranks<0, kFirst>(g, first, second, n, sums);
  }
}

// Sums over ranks for whole groups of elements of one piece.
class RankSums {
 public:
  RankSums(const ServerOp& op, const Piece& p)
      : rows_(op.rows),
        row_bytes_(op.args.row_bytes),
        count_((op.args.world + kGroupRanks - 1) / kGroupRanks) {
    for (uint32_t g = 0; g < count_; ++g) fill_group(op, p, g * kGroupRanks, &groups_[g]);
  }
  // n groups from bit 8 * byte of every row.
  void operator()(uint64_t byte, uint64_t n, float* sums) const {
    const uint8_t* rows = rows_ + byte;
    add_group<true>(groups_[0], rows, row_bytes_, n, sums);
    for (uint32_t g = 1; g < count_; ++g) {
      rows += kGroupRanks * row_bytes_;
      add_group<false>(groups_[g], rows, row_bytes_, n, sums);
    }
  }

 private:
  const uint8_t* rows_;
  uint64_t row_bytes_;
  uint32_t count_;
  RankGroup groups_[kMaxRanks / kGroupRanks];
};

#else  // no lookups: a choice and an addition per rank

// The same for 32 bits as they lie in memory, from a byte border: element i is bit 7 - i % 8 of
// byte i / 8 of the word.
HWY_INLINE VF select_row(VU bytes, size_t k, VF yes, VF no) {
  alignas(64) static constexpr uint32_t kBits[32] = {
      1u << 7,  1u << 6,  1u << 5,  1u << 4,  1u << 3,  1u << 2,  1u << 1,  1u << 0,
      1u << 15, 1u << 14, 1u << 13, 1u << 12, 1u << 11, 1u << 10, 1u << 9,  1u << 8,
      1u << 23, 1u << 22, 1u << 21, 1u << 20, 1u << 19, 1u << 18, 1u << 17, 1u << 16,
      1u << 31, 1u << 30, 1u << 29, 1u << 28, 1u << 27, 1u << 26, 1u << 25, 1u << 24};
  return hn::IfThenElse(hn::RebindMask(DF(), hn::TestBit(bytes, hn::Load(DU(), kBits + k * kN))),
                        yes, no);
}

class RankSums {
 public:
  RankSums(const ServerOp& op, const Piece& p)
      : rows_(op.rows), row_bytes_(op.args.row_bytes), world_(op.args.world) {
    for (uint32_t r = 0; r < world_; ++r) terms_[r] = op.term(r, p);
  }
  void operator()(uint64_t byte, uint64_t n, float* sums) const {
    for (uint64_t h = 0; h < 2 * n; ++h) half(byte + 4 * h, sums + 32 * h);
  }

 private:
  // 32 elements.
  HWY_INLINE void half(uint64_t byte, float* total) const {
    constexpr size_t kHalf = 32 / kN;
    for (uint32_t group = 0; group < world_; group += 8) {
      VF sum[kHalf];
      HWY_UNROLL(8) for (size_t k = 0; k < kHalf; ++k) sum[k] = hn::Zero(DF());
      const uint32_t end = world_ - group < 8 ? world_ : group + 8;
      for (uint32_t r = group; r < end; ++r) {
        uint32_t word;
        std::memcpy(&word, rows_ + r * row_bytes_ + byte, 4);
        const VU bits = hn::Set(DU(), word);
        const VF term = set(terms_[r]);
        const VF minus = hn::Neg(term);
        HWY_UNROLL(8) for (size_t k = 0; k < kHalf; ++k) {
          sum[k] = hn::Add(sum[k], select_row(bits, k, term, minus));
        }
      }
      HWY_UNROLL(8) for (size_t k = 0; k < kHalf; ++k) {
        float* t = total + k * kN;
        hn::Store(group == 0 ? sum[k] : hn::Add(hn::Load(DF(), t), sum[k]), DF(), t);
      }
    }
  }

  const uint8_t* rows_;
  uint64_t row_bytes_;
  uint32_t world_;
  float terms_[kMaxRanks];
};

#endif  // SOTTO_SIMD_LOOKUP

template <bool kMasked, bool kL1>
HWY_INLINE void server_group(const float* sums, float* c, VF scale, VF minus_scale, uint64_t valid,
                             uint8_t* bits, float* lanes) {
  WordBuilder word;
  const WordMasks masks(valid);
  SOTTO_FOR_VECTORS(k) {
    const MF used = kMasked ? masks[k] : no_lanes();
    accumulate<kMasked, kL1>(hn::Load(DF(), sums + k * kN), load(c + k * kN), scale, minus_scale,
                             used, k, c, &word, lanes);
  }
  word.store(bits);
}

template <bool kL1>
void server_groups(ServerOp& op, const Piece& p, uint64_t first, uint64_t n) {
  if (op.args.world > kMaxRanks) return op.elements(p, first, n * kNormLanes);
  const RankSums rank_sums(op, p);
  const VF scale = set(op.old_scales[p.scale]);
  const VF minus_scale = hn::Neg(scale);
  uint64_t flat = p.flat + first;
  float* c = op.c + flat;
  alignas(64) float sums[kBlockElements];
  while (n != 0) {
    const uint64_t block = std::min(n, kBlockElements / kNormLanes);
    rank_sums(flat / 8, block, sums);
    for (uint64_t g = 0; g < block; ++g, flat += kNormLanes, c += kNormLanes) {
      prefetch_group(c);
      const uint64_t valid = valid_word(op.valid, flat + op.args.valid_base);
      const float* sum = sums + g * kNormLanes;
      uint8_t* bits = op.bits + flat / 8;
      if (~valid == 0) {
        server_group<false, kL1>(sum, c, scale, minus_scale, valid, bits, op.lanes);
      } else {
        server_group<true, kL1>(sum, c, scale, minus_scale, valid, bits, op.lanes);
      }
    }
    n -= block;
  }
}

void onebit_server(const KernelCall& call) {
  if (call.arguments<ServerArgs>().scale == ScaleKind::kL2) {
    run_groups<ServerOp>(call, [](ServerOp& op, const Piece& p, uint64_t first, uint64_t n) {
      server_groups<false>(op, p, first, n);
    });
  } else {
    run_groups<ServerOp>(call, [](ServerOp& op, const Piece& p, uint64_t first, uint64_t n) {
      server_groups<true>(op, p, first, n);
    });
  }
}

}  // namespace

void install_server(KernelTable& table) {
  kernel_entry(table, KernelId::kOnebitServer) = onebit_server;
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
