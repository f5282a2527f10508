// Vector kernels of Adam, LAMB and sums of squares. Bytes per element: sum of squares 4, Adam 28
// (20 with bfloat16 state, 16 with 8-bit state), LAMB moments 28, LAMB update 12 (of which the
// cache serves what the moments of a small tensor left there).
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_adam.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/ops_adam.h"
#include "core/cpu/simd-inl.h"
#include "core/cpu/simd_state-inl.h"
#include "core/cpu/simd_types-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

void sum_squares(const KernelCall& call) {
  run_source_groups<SumSquaresOp>(
      call, [](SumSquaresOp& op, const Piece&, uint64_t, uint64_t n, const float* x) {
        for (; n != 0; --n, x += kNormLanes) {
          SOTTO_FOR_VECTORS(k) {
            const VF value = load(x + k * kN);
            add_lanes(op.lanes, k, hn::Mul(value, value));
          }
        }
      });
}

// Numbers of a parameter group, in all lanes.
struct Group {
  HWY_INLINE Group(const GroupScalars& s, const float* clip_coefficient)
      : b1(set(s.b1)),
        one_minus_b1(set(s.one_minus_b1)),
        b2(set(s.b2)),
        one_minus_b2(set(s.one_minus_b2)),
        eps(set(s.eps)),
        wd(set(s.weight_decay)),
        clip(set(clip_coefficient != nullptr ? *clip_coefficient : 1.0f)) {}
  VF b1, one_minus_b1, b2, one_minus_b2, eps, wd;
  VF clip;  // 1 without clipping: a product with 1 is exact
};

HWY_INLINE VF next_m(const Group& s, VF g, VF m) {
  return hn::Add(hn::Mul(s.b1, m), hn::Mul(s.one_minus_b1, g));
}
HWY_INLINE VF next_v(const Group& s, VF g, VF v) {
  return hn::Add(hn::Mul(s.b2, v), hn::Mul(hn::Mul(s.one_minus_b2, g), g));
}

template <bool kMasked>
HWY_INLINE VF gradient(const Group& s, const float* g, const WordMasks& masks, size_t k) {
  const VF value = hn::Mul(load(g + k * kN), s.clip);
  return kMasked ? hn::IfThenElseZero(masks[k], value) : value;
}

enum class Decay { kNone, kL2, kDecoupled };

// position: of the group in its norm block.
template <Decay kDecay, bool kCorrected, bool kMasked, class State>
HWY_INLINE void adam_group(const Group& s, VF correct_m, VF correct_v, VF lr, const float* g,
                           State& state, uint64_t flat, uint32_t position, float* p,
                           uint64_t valid) {
  const WordMasks masks(valid);
  auto rounding = rounding_of(state, position);
  SOTTO_FOR_VECTORS(k) {
    const VF old = load(p + k * kN);
    VF gr = gradient<kMasked>(s, g, masks, k);
    if constexpr (kDecay == Decay::kL2) gr = hn::Add(gr, hn::Mul(s.wd, old));
    VF new_m = next_m(s, gr, old_m(state, flat + k * kN));
    VF new_v = next_v(s, gr, old_v(state, flat + k * kN));
    keep<true>(state, rounding, new_m, new_v, flat + k * kN,
               position + static_cast<uint32_t>(k * kN));
    if constexpr (kCorrected) {
      new_m = hn::Mul(new_m, correct_m);
      new_v = hn::Mul(new_v, correct_v);
    }
    VF u = hn::Div(new_m, hn::Add(hn::Sqrt(new_v), s.eps));
    if constexpr (kDecay == Decay::kDecoupled) u = hn::Add(u, hn::Mul(s.wd, old));
    store(hn::Sub(old, hn::Mul(lr, u)), p + k * kN);
  }
}

template <Decay kDecay, bool kCorrected, class State>
void adam_groups(AdamOp<State>& op, const Piece& piece, uint64_t first, uint64_t n,
                 const float* g) {
  const AdamGroupScalars& scalars = op.groups[piece.group];
  const Group s(scalars, op.gradients.clip);
  const VF correct_m = set(1.0f / scalars.c1);
  const VF correct_v = set(1.0f / scalars.c2);
  const VF lr = set(static_cast<float>(scalars.lr));
  const uint8_t* valid = op.gradients.valid;
  uint64_t flat = piece.flat + first;
  float* p = op.parameter(piece) + first;
  for (; n != 0; --n, first += kNormLanes, flat += kNormLanes, g += kNormLanes, p += kNormLanes) {
    op.state.begin(piece, first, kNormLanes);
    const uint32_t position = position_in_block(piece, first);
    if (valid == nullptr) {
      adam_group<kDecay, kCorrected, false>(s, correct_m, correct_v, lr, g, op.state, flat,
                                            position, p, 0);
    } else {
      adam_group<kDecay, kCorrected, true>(s, correct_m, correct_v, lr, g, op.state, flat, position,
                                           p, load_bits64(valid, flat));
    }
  }
}

template <Decay kDecay, class State>
void adam_decayed(AdamOp<State>& op, const Piece& p, uint64_t first, uint64_t n, const float* g,
                  bool corrected) {
  // Low-precision state has one form for both.
  if (State::kLowPrecision || corrected) return adam_groups<kDecay, true>(op, p, first, n, g);
  if constexpr (!State::kLowPrecision) adam_groups<kDecay, false>(op, p, first, n, g);
}

template <class State>
void adam_as(AdamOp<State>& op, const Piece& p, uint64_t first, uint64_t n, const float* g) {
  const AdamGroupScalars& s = op.groups[p.group];
  const Decay decay = s.weight_decay == 0.0f ? Decay::kNone
                      : s.decoupled != 0     ? Decay::kDecoupled
                                             : Decay::kL2;
  const bool corrected = s.c1 != 1.0f || s.c2 != 1.0f;  // a product with 1 is exact
  switch (decay) {
    case Decay::kNone: return adam_decayed<Decay::kNone>(op, p, first, n, g, corrected);
    case Decay::kL2: return adam_decayed<Decay::kL2>(op, p, first, n, g, corrected);
    case Decay::kDecoupled: return adam_decayed<Decay::kDecoupled>(op, p, first, n, g, corrected);
  }
}

void adam(const KernelCall& call) {
  run_source_groups<AdamOp<FloatState>>(call, adam_as<FloatState>);
}
void adam_low_precision(const KernelCall& call) {
  if (call.arguments<LowPrecisionArgs>().state == StateType::kBf16)
    return run_source_groups<AdamOp<Bf16State>>(call, adam_as<Bf16State>);
  run_source_groups<AdamOp<Fp8Vectors>>(call, adam_as<Fp8Vectors>);
}

// Direction of LAMB from moments and parameter.
template <bool kInside, bool kDecay>
HWY_INLINE VF direction(VF eps, VF wd, VF m, VF v, VF p) {
  const VF den = kInside ? hn::Sqrt(hn::Add(v, eps)) : hn::Add(hn::Sqrt(v), eps);
  const VF u = hn::Div(m, den);
  return kDecay ? hn::Add(u, hn::Mul(wd, p)) : u;
}

// kStream: for directions that do not lie where the gradient was, which is in the cache anyway.
template <bool kInside, bool kDecay, bool kMasked, bool kStream>
HWY_INLINE void moments_group(const Group& s, const float* g, float* m, float* v, const float* p,
                              float* direction_out, uint64_t valid, float* p_lanes,
                              float* u_lanes) {
  const WordMasks masks(valid);
  SOTTO_FOR_VECTORS(k) {
    const VF parameter = load(p + k * kN);
    const VF gr = gradient<kMasked>(s, g, masks, k);
    const VF new_m = next_m(s, gr, load(m + k * kN));
    const VF new_v = next_v(s, gr, load(v + k * kN));
    store(new_m, m + k * kN);
    store(new_v, v + k * kN);
    const VF u = direction<kInside, kDecay>(s.eps, s.wd, new_m, new_v, parameter);
    store_or_stream<kStream>(u, direction_out + k * kN);
    add_lanes(p_lanes, k, hn::Mul(parameter, parameter));
    add_lanes(u_lanes, k, hn::Mul(u, u));
  }
}

template <bool kInside, bool kDecay, bool kStream>
void moments_groups(LambMomentsOp& op, const Piece& piece, uint64_t first, uint64_t n,
                    const float* g) {
  const Group s(op.groups[piece.group], op.gradients.clip);
  const uint8_t* valid = op.gradients.valid;
  uint64_t flat = piece.flat + first;
  const float* p = op.parameter(piece) + first;
  float* u = op.direction(piece) + first;
  for (; n != 0; --n, flat += kNormLanes, g += kNormLanes, p += kNormLanes, u += kNormLanes) {
    float* m = op.m + flat;
    float* v = op.v + flat;
    if (valid == nullptr) {
      moments_group<kInside, kDecay, false, kStream>(s, g, m, v, p, u, 0, op.p_lanes, op.u_lanes);
    } else {
      moments_group<kInside, kDecay, true, kStream>(s, g, m, v, p, u, load_bits64(valid, flat),
                                                    op.p_lanes, op.u_lanes);
    }
  }
}

template <bool kStream>
void moments_as(LambMomentsOp& op, const Piece& p, uint64_t first, uint64_t n, const float* g) {
  const LambGroupScalars& s = op.groups[p.group];
  const bool decay = s.weight_decay != 0.0f;
  if (s.eps_inside_sqrt != 0) {
    return decay ? moments_groups<true, true, kStream>(op, p, first, n, g)
                 : moments_groups<true, false, kStream>(op, p, first, n, g);
  }
  return decay ? moments_groups<false, true, kStream>(op, p, first, n, g)
               : moments_groups<false, false, kStream>(op, p, first, n, g);
}

void lamb_moments(const KernelCall& call) {
  bool streamed = false;
  run_source_groups<LambMomentsOp>(call, [&](LambMomentsOp& op, const Piece& p, uint64_t first,
                                             uint64_t n, const float* g) {
    const float* u = op.direction(p) + first;
    const bool stream = u != g && streams(p.offset + first, u);
    streamed |= stream;
    return stream ? moments_as<true>(op, p, first, n, g) : moments_as<false>(op, p, first, n, g);
  });
  if (streamed) hwy::FlushStream();
}

void lamb_update(const KernelCall& call) {
  run_groups<LambUpdateOp>(
      call, [](LambUpdateOp& op, const Piece& piece, uint64_t first, uint64_t n) {
        const VF step = set(op.steps[piece.tensor].step_size);
        const float* u = op.direction(piece) + first;
        float* p = op.parameter(piece) + first;
        for (; n != 0; --n, u += kNormLanes, p += kNormLanes) {
          SOTTO_FOR_VECTORS(k) {
            store(hn::Sub(load(p + k * kN), hn::Mul(step, load(u + k * kN))), p + k * kN);
          }
        }
      });
}

}  // namespace

void install_adam(KernelTable& table) {
  kernel_entry(table, KernelId::kSumSquares) = sum_squares;
  kernel_entry(table, KernelId::kAdam) = adam;
  kernel_entry(table, KernelId::kAdamLowPrecision) = adam_low_precision;
  kernel_entry(table, KernelId::kLambMoments) = lamb_moments;
  kernel_entry(table, KernelId::kLambUpdate) = lamb_update;
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
