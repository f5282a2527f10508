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

#if HWY_TARGET <= HWY_AVX2  // lookups in 8 lanes or more; better targets have smaller numbers
#define SOTTO_SIMD_LOOKUP 1
#else
#define SOTTO_SIMD_LOOKUP 0
#endif

constexpr uint32_t kMaxRanks = 4096;       // more are left to the reference
constexpr uint64_t kBlockElements = 1024;  // sums of a block stay in L1

#if SOTTO_SIMD_LOOKUP

// Values by nibble. A lookup in 8 lanes takes the lower 3 bits of a nibble, one in 16 lanes all.
struct NibbleTable {
  alignas(64) float at[16];
};

// Sums and terms of one group of eight ranks.
struct RankGroup {
  NibbleTable first;     // sum of ranks 0 - 3
  NibbleTable terms[4];  // +-t of ranks 4 - 7
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
    out->first.at[nibble] = sum;
    for (uint32_t r = 0; r < 4; ++r)
      out->terms[r].at[nibble] = plus_minus(nibble >> r & 1, t[4 + r]);
  }
}

// Brings the bits of four rows together: word k has a nibble for each of the elements 8k .. 8k + 7,
// row r in its bit r. The nibble of element i lies at bit kNibbleShift[i % 8]. n: groups of 64
// elements.
HWY_NOINLINE void gather_nibbles(const uint8_t* const* rows, uint64_t n, uint32_t* words) {
  const hn::Full128<uint8_t> d8;
  const hn::Full128<uint16_t> d16;
  const hn::Full128<uint32_t> d32;
  const hn::Full128<uint64_t> d64;
  const hn::FixedTag<uint32_t, 8> d;
  for (uint64_t byte = 0; byte < 8 * n; byte += 8, words += 8) {
    const auto bytes_of = [&](uint32_t r) HWY_ATTR {
      uint64_t word;
      std::memcpy(&word, rows[r] + byte, 8);
      return hn::BitCast(d8, hn::Set(d64, word));
    };
    const auto rows01 = hn::BitCast(d16, hn::InterleaveLower(d8, bytes_of(0), bytes_of(1)));
    const auto rows23 = hn::BitCast(d16, hn::InterleaveLower(d8, bytes_of(2), bytes_of(3)));
    auto x = hn::Combine(d, hn::BitCast(d32, hn::InterleaveUpper(d16, rows01, rows23)),
                         hn::BitCast(d32, hn::InterleaveLower(d16, rows01, rows23)));
    // Bit address (row high, row low, column high, middle, low) -> (middle, low, high, row high,
    // row low): two exchanges of address bits, each a swap of bits that lie a fixed distance apart.
    auto t = hn::And(hn::Xor(x, hn::ShiftRight<7>(x)), hn::Set(d, 0x00aa00aau));
    x = hn::Xor(x, hn::Xor(t, hn::ShiftLeft<7>(t)));
    t = hn::And(hn::Xor(x, hn::ShiftRight<14>(x)), hn::Set(d, 0x0000ccccu));
    x = hn::Xor(x, hn::Xor(t, hn::ShiftLeft<14>(t)));
    hn::Store(x, d, words);
  }
}

alignas(64) constexpr uint32_t kNibbleShift[16] = {28, 20, 12, 4, 24, 16, 8, 0,
                                                   28, 20, 12, 4, 24, 16, 8, 0};

// Nibbles of the elements k * kN .. from their words; above them there are other bits.
HWY_INLINE VU nibbles_of(const uint32_t* words, uint64_t k, VU shift) {
  if constexpr (kN == 8) {
    return hn::Shr(hn::Set(DU(), words[k]), shift);
  } else {
    const hn::Half<DU> half;
    return hn::Shr(hn::Combine(DU(), hn::Set(half, words[2 * k + 1]), hn::Set(half, words[2 * k])),
                   shift);
  }
}

// The instruction takes as many of the lower bits as it has lanes, whatever is above them;
// Highway's own conversion of indices wants the others to be 0.
HWY_INLINE VF look_up(VF table, VU nibbles) {
  using Index = decltype(hn::IndicesFromVec(DF(), nibbles));
  return hn::TableLookupLanes(table, Index{nibbles.raw});
}

// Lane i: yes or no by bit 3 of its nibble, which a shift brings to the sign.
HWY_INLINE VF by_bit_3(VU nibbles, VF yes, VF no) {
  return hn::IfThenElse(hn::MaskFromVec(hn::BitCast(DF(), hn::ShiftLeft<28>(nibbles))), yes, no);
}

// One group of ranks, ready to be summed over: tables in registers where there are enough. kLong:
// more than four ranks. A term that is 0 because its rank does not exist changes no sum: none of
// them is ever -0.
template <bool kLong>
class GroupSums {
 public:
  HWY_INLINE GroupSums(const RankGroup& g, const uint32_t* first, const uint32_t* second)
      : first_(first),
        second_(second),
        shift_(hn::Load(DU(), kNibbleShift)),
        low_(hn::Load(DF(), g.first.at)),
        high_(hn::Load(DF(), g.first.at + 16 - kN)),
        term4_(hn::Load(DF(), g.terms[0].at)),
        term5_(hn::Load(DF(), g.terms[1].at)),
        term6_(hn::Load(DF(), g.terms[2].at)),
        term7_(kN == 16 ? hn::Load(DF(), g.terms[3].at) : set(g.terms[3].at[15])),
        minus_term7_(hn::Neg(term7_)) {}

  // Elements k * kN .. k * kN + kN - 1.
  HWY_INLINE VF operator()(uint64_t k) const {
    const VU nibbles = nibbles_of(first_, k, shift_);
    VF sum = look_up(low_, nibbles);
    if constexpr (kN == 8) sum = by_bit_3(nibbles, look_up(high_, nibbles), sum);
    if constexpr (kLong) {
      const VU more = nibbles_of(second_, k, shift_);
      sum = hn::Add(sum, look_up(term4_, more));
      sum = hn::Add(sum, look_up(term5_, more));
      sum = hn::Add(sum, look_up(term6_, more));
      sum = hn::Add(sum, kN == 8 ? by_bit_3(more, term7_, minus_term7_) : look_up(term7_, more));
    }
    return sum;
  }

 private:
  const uint32_t* first_;
  const uint32_t* second_;
  VU shift_;
  VF low_, high_, term4_, term5_, term6_, term7_, minus_term7_;
};

// Sums over ranks for a block of elements at a time. All groups of ranks but the last are summed
// ahead; the last one, often the only one, while the vector is used.
class RankSums {
 public:
  RankSums(const ServerOp& op, const Piece& p)
      : rows_(op.rows),
        row_bytes_(op.args.row_bytes),
        count_((op.args.world + kGroupRanks - 1) / kGroupRanks) {
    for (uint32_t g = 0; g < count_; ++g) fill_group(op, p, g * kGroupRanks, &groups_[g]);
  }
  bool single() const { return count_ == 1; }
  bool last_is_long() const { return groups_[count_ - 1].ranks > 4; }

  // n groups of 64 elements from bit 8 * byte of every row.
  void start(uint64_t byte, uint64_t n) {
    for (uint32_t g = 0; g < count_; ++g) {
      gather(g, byte, n);
      if (g + 1 == count_) return;
      const GroupSums<true> group(groups_[g], first_, second_);
      for (uint64_t k = 0; k < n * kVectors; ++k) {
        float* const sum = ahead_ + k * kN;
        const VF before = g == 0 ? hn::Zero(DF()) : hn::Load(DF(), sum);
        hn::Store(hn::Add(before, group(k)), DF(), sum);
      }
    }
  }
  template <bool kLong>
  HWY_INLINE GroupSums<kLong> last() const {
    return GroupSums<kLong>(groups_[count_ - 1], first_, second_);
  }
  // Sums of the groups of ranks before the last.
  const float* ahead() const { return ahead_; }

 private:
  void gather(uint32_t g, uint64_t byte, uint64_t n) {
    const uint8_t* rows = rows_ + uint64_t{g} * kGroupRanks * row_bytes_ + byte;
    // Rows that are not there: any will do, their bits choose among equal sums.
    const uint8_t* row[kGroupRanks];
    for (uint32_t r = 0; r < kGroupRanks; ++r)
      row[r] = rows + (r < groups_[g].ranks ? r : 0) * row_bytes_;
    gather_nibbles(row, n, first_);
    if (groups_[g].ranks > 4) gather_nibbles(row + 4, n, second_);
  }

  const uint8_t* rows_;
  uint64_t row_bytes_;
  uint32_t count_;
  alignas(64) uint32_t first_[kBlockElements / 8];
  alignas(64) uint32_t second_[kBlockElements / 8];
  alignas(64) float ahead_[kBlockElements];
  RankGroup groups_[kMaxRanks / kGroupRanks];
};

// Vector k of a block.
template <bool kLong, bool kSingle>
HWY_INLINE VF block_sum(const GroupSums<kLong>& last, const float* ahead, uint64_t k) {
  return kSingle ? last(k) : hn::Add(hn::Load(DF(), ahead + k * kN), last(k));
}

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
  bool single() const { return true; }
  bool last_is_long() const { return false; }
  void start(uint64_t byte, uint64_t n) {
    for (uint64_t h = 0; h < 2 * n; ++h) half(byte + 4 * h, ahead_ + 32 * h);
  }
  const float* ahead() const { return ahead_; }

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
  alignas(64) float ahead_[kBlockElements];
  float terms_[kMaxRanks];
};

#endif  // SOTTO_SIMD_LOOKUP

// One group of elements; sum(k): vector k of the sums over ranks.
template <bool kMasked, bool kL1, bool kStream, class Sum>
HWY_INLINE void server_group(const Sum& sum, const float* c, float* new_c, VF scale, VF minus_scale,
                             uint64_t valid, uint8_t* bits, float* lanes) {
  WordBuilder word(bits);
  const WordMasks masks(valid);
  SOTTO_FOR_VECTORS(k) {
    const MF used = kMasked ? masks[k] : no_lanes();
    accumulate<kMasked, kL1, kStream>(sum(k), load(c + k * kN), scale, minus_scale, used, k, new_c,
                                      &word, lanes);
  }
  word.store();
}

// n groups of elements of a block, from position `first` of the piece.
template <bool kL1, bool kStream, bool kLong, bool kSingle>
HWY_NOINLINE void server_block(ServerOp& op, const Piece& p, uint64_t first, uint64_t n,
                               const RankSums& sums) {
  const VF scale = set(op.old_scales[p.scale]);
  const VF minus_scale = hn::Neg(scale);
  uint64_t flat = p.flat + first;
#if SOTTO_SIMD_LOOKUP
  const auto last = sums.last<kLong>();
#endif
  for (uint64_t g = 0; g < n; ++g, flat += kNormLanes) {
    const auto sum = [&](size_t k) HWY_ATTR {
#if SOTTO_SIMD_LOOKUP
      return block_sum<kLong, kSingle>(last, sums.ahead(), g * kVectors + k);
#else
      return hn::Load(DF(), sums.ahead() + g * kNormLanes + k * kN);
#endif
    };
    const uint64_t valid = valid_word(op.valid, flat + op.args.valid_base);
    const float* c = op.c + flat;
    float* new_c = op.new_c + flat;
    uint8_t* bits = op.bits + flat / 8;
    if (~valid == 0) {
      server_group<false, kL1, kStream>(sum, c, new_c, scale, minus_scale, valid, bits, op.lanes);
    } else {
      server_group<true, kL1, kStream>(sum, c, new_c, scale, minus_scale, valid, bits, op.lanes);
    }
  }
}

template <bool kL1, bool kStream>
auto server_block_of(const RankSums& sums) {
  if (!SOTTO_SIMD_LOOKUP || sums.single())
    return sums.last_is_long() ? server_block<kL1, kStream, true, true>
                               : server_block<kL1, kStream, false, true>;
  return sums.last_is_long() ? server_block<kL1, kStream, true, false>
                             : server_block<kL1, kStream, false, false>;
}

// Returns whether new_c is on its way to memory.
template <bool kL1>
bool server_groups(ServerOp& op, const Piece& p, uint64_t first, uint64_t n) {
  if (op.args.world > kMaxRanks) {
    op.elements(p, first, n * kNormLanes);
    return false;
  }
  RankSums sums(op, p);
  const uint64_t flat = p.flat + first;
  const bool stream = streams(flat, op.new_c + flat);
  const auto block = stream ? server_block_of<kL1, true>(sums) : server_block_of<kL1, false>(sums);
  while (n != 0) {
    const uint64_t groups = std::min(n, kBlockElements / kNormLanes);
    sums.start((p.flat + first) / 8, groups);
    block(op, p, first, groups, sums);
    first += groups * kNormLanes;
    n -= groups;
  }
  return stream;
}

template <bool kL1>
void run_server(const KernelCall& call) {
  bool streamed = false;
  run_groups<ServerOp>(call, [&](ServerOp& op, const Piece& p, uint64_t first, uint64_t n) {
    if (server_groups<kL1>(op, p, first, n)) streamed = true;
  });
  if (streamed) hwy::FlushStream();
}

void onebit_server(const KernelCall& call) {
  if (call.arguments<ServerArgs>().scale == ScaleKind::kL2) return run_server<false>(call);
  run_server<true>(call);
}

}  // namespace

void install_server(KernelTable& table) {
  kernel_entry(table, KernelId::kOnebitServer) = onebit_server;
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
