// Vector kernels of 0/1 Adam. Bytes per element: frozen Adam from bits 20.125, local momentum 32,
// encoder of a synchronisation 20.125, synchronisation 24.125.
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_zeroone.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/ops_zeroone.h"
#include "core/cpu/simd-inl.h"
#include "core/cpu/simd_types-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

// Numbers of a parameter group, in all lanes.
struct ZeroOneGroup {
  HWY_INLINE explicit ZeroOneGroup(const ZeroOneGroupScalars& s, const float* coefficient = nullptr)
      : b1(set(s.b1)),
        one_minus_b1(set(s.one_minus_b1)),
        eps(set(s.eps)),
        wd(set(s.weight_decay)),
        lr(set(static_cast<float>(s.lr))),
        decay(set(s.decay)),
        clip(set(coefficient != nullptr ? *coefficient : 1.0f)) {}
  VF b1, one_minus_b1, eps, wd, lr, decay;
  VF clip;  // 1 without clipping: a product with 1 is exact
};

template <bool kBits, bool kDecay>
void frozen_groups(FrozenAdamOp& op, const Piece& piece, uint64_t first, uint64_t n,
                   const float* g) {
  const ZeroOneGroup s(op.groups[piece.group], op.gradients.clip);
  const float magnitude = op.mean.magnitude(piece, 1.0f);
  const VF plus = set(magnitude);
  const VF minus = set(-magnitude);
  uint64_t flat = piece.flat + first;
  float* p = op.parameter(piece) + first;
  for (; n != 0; --n, flat += kNormLanes, p += kNormLanes) {
    const WordMasks bits(kBits ? load_bits64(op.mean.bits, flat) : 0);
    const uint64_t valid = valid_word(op.gradients.valid, flat);
    const WordMasks masks(valid);
    float* m = op.m + flat;
    SOTTO_FOR_VECTORS(k) {
      VF gradient = kBits ? bits.choose(k, plus, minus) : hn::Mul(load(g + k * kN), s.clip);
      if (~valid != 0) gradient = hn::IfThenElseZero(masks[k], gradient);
      const VF new_m = hn::Add(hn::Mul(s.b1, load(m + k * kN)), hn::Mul(s.one_minus_b1, gradient));
      store(new_m, m + k * kN);
      const VF root = hn::Sqrt(load(op.v + flat + k * kN));
      VF u = hn::Div(new_m, hn::Add(root, s.eps));
      const VF old = load(p + k * kN);
      if constexpr (kDecay) u = hn::Add(u, hn::Mul(s.wd, old));
      store(hn::Sub(old, hn::Mul(s.lr, u)), p + k * kN);
    }
    if constexpr (!kBits) g += kNormLanes;
  }
}

template <bool kBits>
void frozen_as(FrozenAdamOp& op, const Piece& p, uint64_t first, uint64_t n, const float* g) {
  return op.groups[p.group].weight_decay != 0.0f ? frozen_groups<kBits, true>(op, p, first, n, g)
                                                 : frozen_groups<kBits, false>(op, p, first, n, g);
}

void frozen_adam(const KernelCall& call) {
  if (call.of<kernels::FrozenAdam>().bits.data == nullptr)
    return run_source_groups<FrozenAdamOp>(call, frozen_as<false>);
  run_groups<FrozenAdamOp>(call, [](FrozenAdamOp& op, const Piece& p, uint64_t first, uint64_t n) {
    frozen_as<true>(op, p, first, n, nullptr);
  });
}

void zeroone_local(const KernelCall& call) {
  run_source_groups<ZeroOneLocalOp>(
      call, [](ZeroOneLocalOp& op, const Piece& piece, uint64_t first, uint64_t n, const float* g) {
        const ZeroOneGroup s(op.groups[piece.group], op.gradients.clip);
        uint64_t flat = piece.flat + first;
        float* p = op.parameter(piece) + first;
        for (; n != 0; --n, flat += kNormLanes, g += kNormLanes, p += kNormLanes) {
          const uint64_t valid = valid_word(op.gradients.valid, flat);
          const WordMasks masks(valid);
          SOTTO_FOR_VECTORS(k) {
            const uint64_t at = flat + k * kN;
            VF m = hn::Add(hn::Mul(s.b1, load(op.m + at)),
                           hn::Mul(s.one_minus_b1, hn::Mul(load(g + k * kN), s.clip)));
            VF b = hn::Sub(load(op.b + at), hn::Mul(s.lr, m));
            VF step = hn::Div(b, load(op.den + at));
            const VF anchored = hn::Mul(s.decay, load(op.anchor + at));
            VF parameter = hn::Add(anchored, step);
            if (~valid != 0) {
              m = hn::IfThenElseZero(masks[k], m);
              b = hn::IfThenElseZero(masks[k], b);
              parameter = hn::IfThenElse(masks[k], parameter, anchored);
            }
            store(m, op.m + at);
            store(b, op.b + at);
            store(parameter, p + k * kN);
          }
        }
      });
}

// One group of the encoder: x = b - lr * (b1 * m + (1-b1) * g).
template <bool kMasked, bool kL1>
HWY_INLINE MF encode_group(const ZeroOneEncodeOp& op, const ZeroOneGroup& s, const float* g,
                           uint64_t flat, VF scale, VF minus_scale, uint64_t valid, uint8_t* bits,
                           MF bad) {
  WordBuilder word(bits);
  const WordMasks masks(valid);
  SOTTO_FOR_VECTORS(k) {
    const VF m = hn::Add(hn::Mul(s.b1, load(op.m + flat + k * kN)),
                         hn::Mul(s.one_minus_b1, hn::Mul(load(g + k * kN), s.clip)));
    const VF input = hn::Sub(load(op.b + flat + k * kN), hn::Mul(s.lr, m));
    const MF good = finite(input);
    const MF used = kMasked ? masks[k] : good;
    accumulate<kMasked, kL1>(hn::IfThenElseZero(good, input), load(op.c + flat + k * kN), scale,
                             minus_scale, used, k, op.c + flat, &word, op.lanes);
    bad = hn::Or(bad, kMasked ? hn::AndNot(good, used) : hn::Not(good));
  }
  word.store();
  return bad;
}

template <bool kL1>
void encode_groups(ZeroOneEncodeOp& op, const Piece& piece, uint64_t first, uint64_t n,
                   const float* g) {
  const ZeroOneGroup s(op.groups[piece.group], op.gradients.clip);
  const VF scale = set(op.old_scales[piece.scale]);
  const VF minus_scale = hn::Neg(scale);
  uint64_t flat = piece.flat + first;
  uint8_t* bits = op.bits + (flat - op.args.bits_base) / 8;
  MF bad = no_lanes();
  for (; n != 0; --n, flat += kNormLanes, g += kNormLanes, bits += 8) {
    const uint64_t valid = valid_word(op.gradients.valid, flat);
    bad = ~valid == 0
              ? encode_group<false, kL1>(op, s, g, flat, scale, minus_scale, valid, bits, bad)
              : encode_group<true, kL1>(op, s, g, flat, scale, minus_scale, valid, bits, bad);
  }
  if (!hn::AllFalse(DF(), bad)) op.flags |= kFlagNonfinite;
}

void zeroone_encode(const KernelCall& call) {
  const auto& args = call.arguments<EncodeArgs>();
  if (args.identity || call.of<kernels::ZeroOneEncode>().g.data == nullptr)
    return scalar::zeroone_encode(call);
  return args.scale == ScaleKind::kL2
             ? run_source_groups<ZeroOneEncodeOp>(call, encode_groups<false>)
             : run_source_groups<ZeroOneEncodeOp>(call, encode_groups<true>);
}

template <bool kBits>
void sync_groups(ZeroOneSyncOp& op, const Piece& piece, uint64_t first, uint64_t n) {
  const ZeroOneGroupScalars& scalars = op.groups[piece.group];
  const ZeroOneGroup s(scalars);
  const VF lr_sum = set(scalars.lr_sum);
  const bool restores_m = scalars.lr_sum != 0.0f;
  const float magnitude = op.mean.magnitude(piece, 1.0f);
  const VF plus = set(magnitude);
  const VF minus = set(-magnitude);
  uint64_t flat = piece.flat + first;
  float* p = op.parameter(piece) + first;
  for (; n != 0; --n, flat += kNormLanes, p += kNormLanes) {
    const WordMasks bits(kBits ? load_bits64(op.mean.bits, flat) : 0);
    const uint64_t valid = valid_word(op.valid, flat);
    const WordMasks masks(valid);
    SOTTO_FOR_VECTORS(k) {
      const uint64_t at = flat + k * kN;
      const VF x = kBits ? bits.choose(k, plus, minus) : load(op.mean.floats + at);
      VF step = hn::Div(x, load(op.den + at));
      VF m = restores_m ? hn::Div(hn::Neg(x), lr_sum) : load(op.m + at);
      if (~valid != 0) {
        step = hn::IfThenElseZero(masks[k], step);
        m = hn::IfThenElseZero(masks[k], m);
      }
      const VF parameter = hn::Add(hn::Mul(s.decay, load(op.anchor + at)), step);
      store(m, op.m + at);
      store(hn::Zero(DF()), op.b + at);
      store(parameter, op.anchor + at);
      store(parameter, p + k * kN);
    }
  }
}

void zeroone_sync(const KernelCall& call) {
  if (call.of<kernels::ZeroOneSync>().x.bits.data != nullptr) {
    run_groups<ZeroOneSyncOp>(call, [](ZeroOneSyncOp& op, const Piece& p, uint64_t first,
                                       uint64_t n) { sync_groups<true>(op, p, first, n); });
  } else {
    run_groups<ZeroOneSyncOp>(call, [](ZeroOneSyncOp& op, const Piece& p, uint64_t first,
                                       uint64_t n) { sync_groups<false>(op, p, first, n); });
  }
}

}  // namespace

void install_zeroone(KernelTable& table) {
  kernel_entry(table, KernelId::kFrozenAdam) = frozen_adam;
  kernel_entry(table, KernelId::kZeroOneLocal) = zeroone_local;
  kernel_entry(table, KernelId::kZeroOneEncode) = zeroone_encode;
  kernel_entry(table, KernelId::kZeroOneSync) = zeroone_sync;
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
