// Vector kernels of the compressed stage of 1-bit LAMB. Bytes per element with momentum as bits:
// pass A 16.25 with weight decay (12.25 without: parameters are not read), pass B 12.125.
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_onebit_lamb.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/ops_onebit_lamb.h"
#include "core/cpu/simd-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

void prepare(const KernelCall& call) {
  run_groups<FreezeVarianceOp>(
      call, [](FreezeVarianceOp& op, const Piece& p, uint64_t first, uint64_t n) {
        const VF eps = set(op.groups[p.group].eps);
        for (; n != 0; --n, first += kNormLanes) {
          const uint64_t flat = p.flat + first;
          const float* v = op.v + flat;
          MF zeros = no_lanes();
          SOTTO_FOR_VECTORS(k) zeros = hn::Or(zeros, hn::Eq(load(v + k * kN), hn::Zero(DF())));
          // Groups that change or read the mask are few.
          const bool clears = op.valid != nullptr && op.mask_zero && !hn::AllFalse(DF(), zeros);
          if (clears || (op.valid != nullptr && ~load_bits64(op.valid, flat) != 0)) {
            op.elements(p, first, kNormLanes);
            continue;
          }
          SOTTO_FOR_VECTORS(k) {
            const VF variance = load(v + k * kN);
            if (op.vf != nullptr) store(variance, op.vf + flat + k * kN);
            if (op.den != nullptr) store(hn::Add(hn::Sqrt(variance), eps), op.den + flat + k * kN);
            if (op.m == nullptr) continue;
            const VF m = load(op.m + flat + k * kN);
            add_lanes(op.lanes, k, hn::Mul(m, m));
          }
        }
      });
}

// Constants of pass A for one piece.
struct FactorConstants {
  VF b1, one_minus_b1, b2, one_minus_b2, eps, wd;
  VF fresh, minus_fresh, old, minus_old;  // momentum where it comes from bits
  VF same, different;  // (1-b2)*gr*gr where both momenta are bits: equal and unequal ones
};

// Operands of one group.
struct FactorGroup {
  const float* fresh;  // momentum as floats, or its bits
  uint64_t fresh_bits;
  const float* old;
  uint64_t old_bits;
  float* vf;
  const float* den;
  const float* p;
  uint64_t valid;
};

// The largest ratio den / (sqrt(vf) + eps) of a block so far. Square root and division of the exact
// ratio are needed only where it may be larger; that is seen without them: ratio > best means y =
// den / best - eps > sqrt(vf), so y * y > vf. A margin of 2^-18 on den / best is far above all
// rounding errors of ratio and test, and y is raised to 2^-50 so that the square is a normal
// number; where vf is below 2^-100 the test then always says "may be larger".
class LargestRatio {
 public:
  HWY_INLINE LargestRatio(float best, VF eps) : eps_(eps) { raise(best); }
  HWY_INLINE float best() const { return best_; }

  // Lanes whose ratio is surely not above the best.
  HWY_INLINE MF below(VF den, VF vf) const {
    const VF y = hn::Max(hn::Sub(hn::Mul(den, per_best_), eps_), set(0x1p-50f));
    return hn::Le(hn::Mul(y, y), vf);
  }
  // The exact ratios of a group. valid: as WordMasks.
  HWY_NOINLINE void update(const float* den, const float* vf, uint64_t valid) {
    const WordMasks masks(valid);
    VF largest = set(best_);
    SOTTO_FOR_VECTORS(k) {
      VF ratio = hn::Div(load(den + k * kN), hn::Add(hn::Sqrt(load(vf + k * kN)), eps_));
      ratio = hn::IfThenElseZero(masks[k], ratio);
      largest = hn::IfThenElse(hn::Gt(ratio, largest), ratio, largest);
    }
    HWY_ALIGN float lanes[kN];
    hn::Store(largest, DF(), lanes);
    raise(*std::max_element(lanes, lanes + kN));
  }

 private:
  static constexpr float kMargin = 1 + 0x1p-18f;
  HWY_INLINE void raise(float best) {
    best_ = best;
    per_best_ = set((1.0f / best) * kMargin);
  }

  VF eps_, per_best_;
  float best_;
};

// One group of pass A but for its maximum. Returns the lanes whose ratio is surely not a new
// maximum.
template <bool kFreshBits, bool kOldBits, bool kMasked, bool kDecay>
HWY_INLINE MF factor_group(const FactorConstants& s, const FactorGroup& g, float* u0_lanes,
                           float* u_lanes, const LargestRatio& largest) {
  const WordMasks fresh_bits(g.fresh_bits);
  const WordMasks old_bits(g.old_bits);
  const WordMasks change(g.fresh_bits ^ g.old_bits);
  const WordMasks masks(g.valid);
  MF all_below = hn::Not(no_lanes());
  SOTTO_FOR_VECTORS(k) {
    const MF valid = kMasked ? masks[k] : no_lanes();
    const VF den = load(g.den + k * kN);
    const VF vf = load(g.vf + k * kN);
    const VF m = kFreshBits ? fresh_bits.choose(k, s.fresh, s.minus_fresh) : load(g.fresh + k * kN);
    VF square;
    if constexpr (kFreshBits && kOldBits) {
      square = change.choose(k, s.different, s.same);
    } else {
      const VF o = kOldBits ? old_bits.choose(k, s.old, s.minus_old) : load(g.old + k * kN);
      const VF gr = hn::Div(hn::Sub(m, hn::Mul(s.b1, o)), s.one_minus_b1);
      square = hn::Mul(hn::Mul(s.one_minus_b2, gr), gr);
    }
    VF new_vf = hn::Add(hn::Mul(s.b2, vf), square);
    MF below = largest.below(den, new_vf);
    if constexpr (kMasked) {
      new_vf = hn::IfThenElse(valid, new_vf, vf);
      below = hn::Or(below, hn::Not(valid));
    }
    all_below = hn::And(all_below, below);
    store(new_vf, g.vf + k * kN);
    if constexpr (kDecay) {
      VF u0 = hn::Div(m, den);
      if constexpr (kMasked) u0 = hn::IfThenElseZero(valid, u0);
      const VF u = hn::Add(u0, hn::Mul(s.wd, load(g.p + k * kN)));
      add_lanes(u0_lanes, k, hn::Mul(u0, u0));
      add_lanes(u_lanes, k, hn::Mul(u, u));
    }
  }
  return all_below;
}

template <bool kFreshBits, bool kOldBits, bool kDecay>
void factor_groups(FactorOp& op, const Piece& piece, uint64_t first, uint64_t n) {
  const GroupScalars& group = op.groups[piece.group];
  const float scaling = scaling_of(op.states, piece);
  const float fresh = op.fresh.magnitude(piece, scaling);
  const float old = op.old.magnitude(piece, scaling);
  // Signs of both momenta turned round turn the sign of gr round, not its square.
  const float same = fresh_square(group, fresh, old);
  const float different = fresh_square(group, fresh, -old);
  const FactorConstants s{set(group.b1),  set(group.one_minus_b1),
                          set(group.b2),  set(group.one_minus_b2),
                          set(group.eps), set(group.weight_decay),
                          set(fresh),     set(-fresh),
                          set(old),       set(-old),
                          set(same),      set(different)};
  uint64_t flat = piece.flat + first;
  const float* p = op.parameter(piece) + first;
  LargestRatio largest(*op.best, s.eps);
  for (; n != 0; --n, flat += kNormLanes, p += kNormLanes) {
    FactorGroup g{};
    if constexpr (kFreshBits) {
      g.fresh_bits = load_bits64(op.fresh.bits, flat);
    } else {
      g.fresh = op.fresh.floats + flat;
    }
    if constexpr (kOldBits) {
      g.old_bits = load_bits64(op.old.bits, flat);
    } else {
      g.old = op.old.floats + flat;
    }
    g.vf = op.vf + flat;
    g.den = op.den + flat;
    g.p = p;
    g.valid = op.valid != nullptr ? load_bits64(op.valid, flat) : ~uint64_t{0};
    const MF below = ~g.valid == 0 ? factor_group<kFreshBits, kOldBits, false, kDecay>(
                                         s, g, op.u0_lanes, op.u_lanes, largest)
                                   : factor_group<kFreshBits, kOldBits, true, kDecay>(
                                         s, g, op.u0_lanes, op.u_lanes, largest);
    if (!hn::AllTrue(DF(), below)) largest.update(g.den, g.vf, g.valid);
  }
  *op.best = largest.best();
}

template <bool kFreshBits, bool kOldBits>
void factor_as(const KernelCall& call) {
  run_groups<FactorOp>(call, [](FactorOp& op, const Piece& p, uint64_t first, uint64_t n) {
    if (op.groups[p.group].weight_decay != 0.0f) {
      factor_groups<kFreshBits, kOldBits, true>(op, p, first, n);
    } else {
      factor_groups<kFreshBits, kOldBits, false>(op, p, first, n);
    }
  });
}

void factor(const KernelCall& call) {
  const auto& o = call.of<kernels::OnebitLambFactor>();
  const bool fresh_bits = o.m.bits.data != nullptr;
  const bool old_bits = o.old.bits.data != nullptr;
  if (fresh_bits) return old_bits ? factor_as<true, true>(call) : factor_as<true, false>(call);
  return old_bits ? factor_as<false, true>(call) : factor_as<false, false>(call);
}

template <bool kBits, bool kDecay>
void update_groups(MomentumUpdateOp& op, const Piece& piece, uint64_t first, uint64_t n) {
  const float magnitude = op.momentum.magnitude(piece, scaling_of(op.states, piece));
  const VF plus = set(magnitude);
  const VF minus = set(-magnitude);
  const VF wd = set(op.groups[piece.group].weight_decay);
  const VF step = set(op.steps[piece.tensor].step_size);
  uint64_t flat = piece.flat + first;
  float* p = op.parameter(piece) + first;
  for (; n != 0; --n, flat += kNormLanes, p += kNormLanes) {
    const float* den = op.den + flat;
    const WordMasks bits(kBits ? load_bits64(op.momentum.bits, flat) : 0);
    const uint64_t valid = op.valid != nullptr ? load_bits64(op.valid, flat) : ~uint64_t{0};
    const WordMasks masks(valid);
    SOTTO_FOR_VECTORS(k) {
      const VF old = load(p + k * kN);
      const VF m = kBits ? bits.choose(k, plus, minus) : load(op.momentum.floats + flat + k * kN);
      VF u = hn::Div(m, load(den + k * kN));
      if (~valid != 0) u = hn::IfThenElseZero(masks[k], u);
      if constexpr (kDecay) u = hn::Add(u, hn::Mul(wd, old));
      store(hn::Sub(old, hn::Mul(step, u)), p + k * kN);
    }
  }
}

template <bool kBits>
void update_as(const KernelCall& call) {
  run_groups<MomentumUpdateOp>(
      call, [](MomentumUpdateOp& op, const Piece& p, uint64_t first, uint64_t n) {
        if (op.groups[p.group].weight_decay != 0.0f) {
          update_groups<kBits, true>(op, p, first, n);
        } else {
          update_groups<kBits, false>(op, p, first, n);
        }
      });
}

void update(const KernelCall& call) {
  return call.of<kernels::MomentumUpdate>().m.bits.data != nullptr ? update_as<true>(call)
                                                                   : update_as<false>(call);
}

}  // namespace

void install_onebit_lamb(KernelTable& table) {
  kernel_entry(table, KernelId::kFreezeVariance) = prepare;
  kernel_entry(table, KernelId::kOnebitLambFactor) = factor;
  kernel_entry(table, KernelId::kMomentumUpdate) = update;
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
