// Vector kernels of the 1-bit codec. Bytes per element: encode 12.125, server 8.125 + W / 8,
// decode 4.125.
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_onebit.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/ops_onebit.h"
#include "core/cpu/simd-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

// One group. masks: valid elements (kMasked). Returns whether every valid input is finite.
template <bool kMasked, bool kL1>
HWY_INLINE MF encode_group(const float* x, float* c, VF scale, VF minus_scale,
                           const WordMasks& masks, uint8_t* bits, float* lanes, MF all_finite) {
  WordBuilder word;
  SOTTO_FOR_VECTORS(k) {
    const VF input = load(x + k * kN);
    const VF old = load(c + k * kN);
    MF good = finite(input);
    VF value = hn::Add(hn::IfThenElseZero(good, input),
                       hn::Sub(old, hn::IfThenElse(not_negative(old), scale, minus_scale)));
    if constexpr (kMasked) {
      const MF valid = masks[k];
      value = hn::IfThenElseZero(valid, value);
      good = hn::Or(good, hn::Not(valid));
    }
    all_finite = hn::And(all_finite, good);
    store(value, c + k * kN);
    word.add(k, not_negative(value));
    add_lanes(lanes, k, norm_terms<kL1>(value));
  }
  word.store(bits);
  return all_finite;
}

template <bool kL1>
void encode_groups(EncodeOp& op, const Piece& p, uint64_t first, uint64_t n) {
  const VF scale = set(op.old_scales[p.scale]);
  const VF minus_scale = hn::Neg(scale);
  const float* x = op.input(p) + first;
  uint64_t flat = p.flat + first;
  float* c = op.c + flat;
  uint8_t* bits = op.bits + (flat - op.args.bits_base) / 8;
  MF all_finite = hn::Eq(scale, scale);
  all_finite = hn::Or(all_finite, hn::Not(all_finite));
  for (; n != 0; --n, x += kNormLanes, c += kNormLanes, flat += kNormLanes, bits += 8) {
    prefetch_group(x);
    prefetch_group(c);
    const uint64_t valid = op.valid != nullptr ? load_bits64(op.valid, flat) : ~uint64_t{0};
    const WordMasks masks(valid);
    all_finite =
        ~valid == 0
            ? encode_group<false, kL1>(x, c, scale, minus_scale, masks, bits, op.lanes, all_finite)
            : encode_group<true, kL1>(x, c, scale, minus_scale, masks, bits, op.lanes, all_finite);
  }
  if (!hn::AllTrue(DF(), all_finite)) op.flags |= kFlagNonfinite;
}

void onebit_encode(const KernelCall& call) {
  if (call.arguments<EncodeArgs>().scale == ScaleKind::kL2) {
    run_groups<EncodeOp>(call, [](EncodeOp& op, const Piece& p, uint64_t first, uint64_t n) {
      encode_groups<false>(op, p, first, n);
    });
  } else {
    run_groups<EncodeOp>(call, [](EncodeOp& op, const Piece& p, uint64_t first, uint64_t n) {
      encode_groups<true>(op, p, first, n);
    });
  }
}

}  // namespace

void install_onebit(KernelTable& table) {
  kernel_entry(table, KernelId::kOnebitEncode) = onebit_encode;
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
