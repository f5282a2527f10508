// Vector encoders and decoder of the 1-bit codec. Bytes per element: encode 12.125, encoder of
// 1-bit LAMB 12.25 (momentum as bits) or 16.125, decode 4.125.
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_onebit.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/ops_onebit.h"
#include "core/cpu/ops_onebit_lamb.h"
#include "core/cpu/simd-inl.h"
#include "core/cpu/simd_types-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

// One group. Returns `bad` with the lanes that met a valid input that is not finite.
template <bool kMasked, bool kL1>
HWY_INLINE MF encode_group(const float* x, VF by, float* c, VF scale, VF minus_scale,
                           uint64_t valid, uint8_t* bits, float* lanes, MF bad) {
  WordBuilder word(bits);
  const WordMasks masks(valid);
  SOTTO_FOR_VECTORS(k) {
    const VF input = hn::Mul(load(x + k * kN), by);
    const MF good = finite(input);
    const MF used = kMasked ? masks[k] : good;
    accumulate<kMasked, kL1>(hn::IfThenElseZero(good, input), load(c + k * kN), scale, minus_scale,
                             used, k, c, &word, lanes);
    bad = hn::Or(bad, kMasked ? hn::AndNot(good, used) : hn::Not(good));
  }
  word.store();
  return bad;
}

template <bool kL1>
void encode_groups(EncodeOp& op, const Piece& p, uint64_t first, uint64_t n, const float* x) {
  const VF scale = set(op.old_scales[p.scale]);
  const VF minus_scale = hn::Neg(scale);
  const VF by = set(op.factor());
  uint64_t flat = p.flat + first;
  float* c = op.c + flat;
  uint8_t* bits = op.bits + (flat - op.args.bits_base) / 8;
  MF bad = no_lanes();
  for (; n != 0; --n, x += kNormLanes, c += kNormLanes, flat += kNormLanes, bits += 8) {
    const uint64_t valid = valid_word(op.valid, flat);
    bad = ~valid == 0
              ? encode_group<false, kL1>(x, by, c, scale, minus_scale, valid, bits, op.lanes, bad)
              : encode_group<true, kL1>(x, by, c, scale, minus_scale, valid, bits, op.lanes, bad);
  }
  if (!hn::AllFalse(DF(), bad)) op.flags |= kFlagNonfinite;
}

void onebit_encode(const KernelCall& call) {
  return call.arguments<EncodeArgs>().scale == ScaleKind::kL2
             ? run_source_groups<EncodeOp>(call, encode_groups<false>)
             : run_source_groups<EncodeOp>(call, encode_groups<true>);
}

// Constants of the encoder of 1-bit LAMB for one piece. kept: b1 * m where m comes from bits.
struct OnebitLambConstants {
  VF b1, one_minus_b1, clip, scaling, kept, minus_kept, scale, minus_scale;
};

// One group of the encoder of 1-bit LAMB: x is computed from gradient and momentum.
template <bool kBits, bool kMasked, bool kL1>
HWY_INLINE MF encode_group(const OnebitLambConstants& s, const float* g, const float* m,
                           uint64_t m_bits, float* c, uint64_t valid, uint8_t* bits, float* lanes,
                           MF bad) {
  WordBuilder word(bits);
  const WordMasks masks(valid);
  const WordMasks momentum(m_bits);
  SOTTO_FOR_VECTORS(k) {
    const VF kept =
        kBits ? momentum.choose(k, s.kept, s.minus_kept) : hn::Mul(s.b1, load(m + k * kN));
    const VF gradient = hn::Mul(s.one_minus_b1, hn::Mul(load(g + k * kN), s.clip));
    const VF input = hn::Mul(hn::Add(kept, gradient), s.scaling);
    const MF good = finite(input);
    const MF used = kMasked ? masks[k] : good;
    accumulate<kMasked, kL1>(hn::IfThenElseZero(good, input), load(c + k * kN), s.scale,
                             s.minus_scale, used, k, c, &word, lanes);
    bad = hn::Or(bad, kMasked ? hn::AndNot(good, used) : hn::Not(good));
  }
  word.store();
  return bad;
}

template <bool kBits, bool kL1>
void encode_groups(OnebitLambEncodeOp& op, const Piece& p, uint64_t first, uint64_t n,
                   const float* g) {
  const float scaling = scaling_of(op.states, p);
  const float magnitude = op.momentum.magnitude(p, scaling);
  const GroupScalars& group = op.groups[p.group];
  const float scale = op.old_scales[p.scale];
  const OnebitLambConstants s{set(group.b1),
                              set(group.one_minus_b1),
                              set(op.clip != nullptr ? *op.clip : 1.0f),
                              set(scaling),
                              set(group.b1 * magnitude),
                              set(-(group.b1 * magnitude)),
                              set(scale),
                              set(-scale)};
  uint64_t flat = p.flat + first;
  float* c = op.c + flat;
  uint8_t* bits = op.bits + (flat - op.args.bits_base) / 8;
  const float* m = kBits ? c : op.momentum.floats + flat;
  MF bad = no_lanes();
  for (; n != 0;
       --n, g += kNormLanes, m += kNormLanes, c += kNormLanes, flat += kNormLanes, bits += 8) {
    const uint64_t m_bits = kBits ? load_bits64(op.momentum.bits, flat) : 0;
    const uint64_t valid = valid_word(op.valid, flat);
    bad = ~valid == 0
              ? encode_group<kBits, false, kL1>(s, g, m, m_bits, c, valid, bits, op.lanes, bad)
              : encode_group<kBits, true, kL1>(s, g, m, m_bits, c, valid, bits, op.lanes, bad);
  }
  if (!hn::AllFalse(DF(), bad)) op.flags |= kFlagNonfinite;
}

void onebit_lamb_encode(const KernelCall& call) {
  const auto& args = call.arguments<EncodeArgs>();
  if (args.identity) return scalar::onebit_lamb_encode(call);
  const bool bits = call.of<kernels::OnebitLambEncode>().m.bits.data != nullptr;
  if (args.scale == ScaleKind::kL1)
    return bits ? run_source_groups<OnebitLambEncodeOp>(call, encode_groups<true, true>)
                : run_source_groups<OnebitLambEncodeOp>(call, encode_groups<false, true>);
  return bits ? run_source_groups<OnebitLambEncodeOp>(call, encode_groups<true, false>)
              : run_source_groups<OnebitLambEncodeOp>(call, encode_groups<false, false>);
}

// Outputs of calls of this size are larger than what the reader of y finds in L2, so they go past
// the caches.
constexpr uint64_t kStreamElements = 32768;

// n groups from element `first`, whose address is a multiple of 64 bytes.
template <bool kStream>
void decode_groups(const DecodeOp& op, const Piece& p, uint64_t first, uint64_t n) {
  const VF scale = set(op.scale(p));
  const VF minus = hn::Neg(scale);
  float* y = op.output(p) + first;
  uint64_t flat = p.flat + first;
  for (; n != 0; --n, y += kNormLanes, flat += kNormLanes) {
    const WordMasks bits(load_bits64(op.bits, flat));
    const uint64_t valid = valid_word(op.valid, flat);
    const WordMasks masks(valid);
    SOTTO_FOR_VECTORS(k) {
      VF value = bits.choose(k, scale, minus);
      if (~valid != 0) value = hn::IfThenElseZero(masks[k], value);
      if constexpr (kStream) {
        hn::Stream(value, DF(), y + k * kN);
      } else {
        hn::Store(value, DF(), y + k * kN);
      }
    }
  }
}

void onebit_decode(const KernelCall& call) {
  DecodeOp op(call);
  uint64_t total = 0;
  for (const Piece& p : call.pieces) total += p.count;
  const bool stream = total >= kStreamElements;
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const uint64_t line = reinterpret_cast<uintptr_t>(op.output(p)) / sizeof(float) % 16;
    const uint64_t head = std::min<uint64_t>(p.count, (16 - line) % 16);
    const uint64_t n = (p.count - head) / kNormLanes;
    op.elements(p, 0, head);
    if (stream) {
      decode_groups<true>(op, p, head, n);
    } else {
      decode_groups<false>(op, p, head, n);
    }
    const uint64_t done = head + n * kNormLanes;
    op.elements(p, done, p.count - done);
  }
  if (stream) hwy::FlushStream();
}

}  // namespace

void install_onebit(KernelTable& table) {
  kernel_entry(table, KernelId::kOnebitEncode) = onebit_encode;
  kernel_entry(table, KernelId::kOnebitLambEncode) = onebit_lamb_encode;
  kernel_entry(table, KernelId::kOnebitDecode) = onebit_decode;
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
