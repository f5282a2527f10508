// Vector kernels of outer optimizers. Bytes per element: difference from the anchor 12 (8 for the
// sums alone), norm of the average 4 (8 with an anchor). The step with momentum and merge "reset":
// 24; in two passes 12 and 20.
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_outer.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/ops_outer.h"
#include "core/cpu/simd-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

template <bool kStores, bool kParams>
void delta_groups(OuterDeltaOp& op, const Piece& piece, uint64_t first, uint64_t n) {
  const float* x = op.live(piece) + first;
  uint64_t flat = piece.flat + first;
  MF bad = no_lanes();
  for (; n != 0; --n, x += kNormLanes, flat += kNormLanes) {
    SOTTO_FOR_VECTORS(k) {
      const VF live = load(x + k * kN);
      const VF d = hn::Sub(load(op.anchor + flat + k * kN), live);
      add_lanes(op.lanes, k, hn::Mul(d, d));
      if constexpr (kStores) {
        const VF y = kParams ? live : d;
        store(y, op.y + flat + k * kN);
        bad = hn::Or(bad, hn::Not(finite(y)));
      }
    }
  }
  if (!hn::AllFalse(DF(), bad)) op.flags |= kFlagNonfinite;
}

void outer_delta(const KernelCall& call) {
  run_groups<OuterDeltaOp>(call, [](OuterDeltaOp& op, const Piece& p, uint64_t first, uint64_t n) {
    if (op.y == nullptr) return delta_groups<false, false>(op, p, first, n);
    return op.params ? delta_groups<true, true>(op, p, first, n)
                     : delta_groups<true, false>(op, p, first, n);
  });
}

template <bool kParams>
void norm_groups(OuterNormOp& op, uint64_t flat, uint64_t n) {
  const VF mean = set(op.mean);
  for (; n != 0; --n, flat += kNormLanes) {
    SOTTO_FOR_VECTORS(k) {
      VF u = hn::Mul(load(op.sum + flat + k * kN), mean);
      if constexpr (kParams) u = hn::Sub(load(op.anchor + flat + k * kN), u);
      add_lanes(op.lanes, k, hn::Mul(u, u));
    }
  }
}

void outer_norm(const KernelCall& call) {
  run_groups<OuterNormOp>(call, [](OuterNormOp& op, const Piece& p, uint64_t first, uint64_t n) {
    return op.anchor != nullptr ? norm_groups<true>(op, p.flat + first, n)
                                : norm_groups<false>(op, p.flat + first, n);
  });
}

HWY_INLINE VF load_or_zero(const float* values, uint64_t flat) {
  return values != nullptr ? load(values + flat) : hn::Zero(DF());
}

// Numbers of a step, in all lanes.
struct StepNumbers {
  HWY_INLINE StepNumbers(const OuterStepOp& op, const Piece& piece)
      : StepNumbers(op.args, op.element.n, inv_lambda_of(op.args, op.factors, piece)) {}
  HWY_INLINE StepNumbers(const OuterStepArgs& args, const OuterNumbers& n, float of_segment)
      : mean(set(n.mean)),
        inv_lambda(set(of_segment)),
        last_alpha(set(n.last_alpha)),
        freshness(set(n.freshness)),
        beta(set(n.beta)),
        alpha(set(n.alpha)),
        limit(set(n.limit)),
        minus_limit(set(-n.limit)),
        shrink(set(n.shrink)),
        a(set(args.a)),
        one_minus_a(set(args.one_minus_a)) {}

  HWY_INLINE VF momentum(VF m, VF g) const { return hn::Add(hn::Mul(beta, m), g); }
  HWY_INLINE VF limited(OuterClip clip, VF m) const {
    if (clip == OuterClip::kNone) return m;
    if (clip == OuterClip::kNorm) return hn::Mul(m, shrink);
    const VF above = hn::IfThenElse(hn::Gt(m, limit), limit, m);
    return hn::IfThenElse(hn::Lt(m, minus_limit), minus_limit, above);
  }
  HWY_INLINE VF merged(const OuterStepOp& op, const float* x, VF anchor, uint64_t at) const {
    switch (op.args.merge) {
      case OuterMerge::kReset: return anchor;
      case OuterMerge::kLerp: return hn::Add(hn::Mul(a, load(x)), hn::Mul(one_minus_a, anchor));
      case OuterMerge::kAddProgress:
        return hn::Add(anchor, hn::Sub(load(x), load_or_zero(op.arrays.x_launch, at)));
      case OuterMerge::kPull: return hn::Add(hn::Mul(one_minus_a, load(x)), hn::Mul(a, anchor));
    }
    return anchor;
  }

  VF mean, inv_lambda, last_alpha, freshness, beta, alpha, limit, minus_limit, shrink, a,
      one_minus_a;
};

// kPlain: of an average of differences, all of it late.
template <bool kPlain>
HWY_INLINE VF pseudo_gradient(const OuterStepOp& op, const StepNumbers& s, VF sum, uint64_t flat) {
  VF u = hn::Mul(sum, s.mean);
  if constexpr (kPlain) return hn::Mul(u, s.inv_lambda);
  const OuterArrays& from = op.arrays;
  if (op.args.params) u = hn::Sub(load_or_zero(from.start, flat), u);
  VF d = u;
  if (op.args.anchor_diff) d = hn::Sub(u, hn::Mul(s.last_alpha, load_or_zero(from.last, flat)));
  const VF v = hn::Mul(d, s.inv_lambda);
  if (from.fresh == nullptr) return v;
  const VF newer = hn::Sub(load(from.fresh + flat), load_or_zero(from.previous, flat));
  return hn::Add(v, hn::Mul(s.freshness, hn::Add(newer, hn::Sub(d, v))));
}

// New momentum, before the clip.
template <bool kPlain>
void momentum_groups(OuterStepOp& op, const Piece& piece, uint64_t first, uint64_t n) {
  const StepNumbers s(op, piece);
  float* all = op.arrays.m;
  for (uint64_t flat = piece.flat + first; n != 0; --n, flat += kNormLanes) {
    SOTTO_FOR_VECTORS(k) {
      const uint64_t at = flat + k * kN;
      const VF g = pseudo_gradient<kPlain>(op, s, load_or_zero(op.arrays.sum, at), at);
      const VF m = s.momentum(load(all + at), g);
      store(m, all + at);
      add_lanes(op.m_lanes, k, hn::Mul(m, m));
    }
  }
}

// One vector of an update. Returns the new anchor, which is stored.
template <bool kPlain>
HWY_INLINE VF move(OuterStepOp& op, const StepNumbers& s, uint64_t at, size_t k) {
  const OuterArrays& arrays = op.arrays;
  const VF zero = hn::Zero(DF());
  const VF old = load(arrays.anchor + at);
  VF sum = zero, g = zero;
  if (op.element.has_gradient()) {
    sum = load_or_zero(arrays.sum, at);
    g = pseudo_gradient<kPlain>(op, s, sum, at);
  }
  VF step = g;
  if (arrays.m != nullptr) {
    VF m = load(arrays.m + at);
    if (op.element.adds_gradient()) m = s.momentum(m, g);
    step = s.limited(op.args.clip, m);
    if (op.counts) {
      const MF changed = hn::Or(hn::Lt(step, m), hn::Gt(step, m));
      add_lanes(op.clipped_lanes, k, hn::IfThenElseZero(changed, set(1.0f)));
    }
    store(step, arrays.m + at);
    if (op.args.rule == OuterRule::kNesterov) step = s.momentum(step, g);
  }
  VF change = hn::Mul(s.alpha, step);
  VF anchor = hn::Sub(old, change);
  if (!kPlain && op.element.takes_mean()) {
    anchor = hn::Mul(sum, s.mean);
    step = change = hn::Sub(old, anchor);
  }
  if (arrays.last_step != nullptr) store(step, arrays.last_step + at);
  store(anchor, arrays.anchor + at);
  add_lanes(op.step_lanes, k, hn::Mul(change, change));
  return anchor;
}

template <bool kPlain>
void move_groups(OuterStepOp& op, const Piece& piece, uint64_t first, uint64_t n) {
  const StepNumbers s(op, piece);
  float* x = op.live(piece);
  for (uint64_t flat = piece.flat + first; n != 0; --n, first += kNormLanes, flat += kNormLanes) {
    SOTTO_FOR_VECTORS(k) {
      const uint64_t at = flat + k * kN;
      const VF anchor = move<kPlain>(op, s, at, k);
      if (x == nullptr) continue;
      float* live = x + first + k * kN;
      store(s.merged(op, live, anchor, at), live);
    }
  }
}

void merge_groups(OuterStepOp& op, const Piece& piece, uint64_t first, uint64_t n) {
  const StepNumbers s(op, piece);
  float* x = op.live(piece);
  if (x == nullptr) return;
  for (uint64_t flat = piece.flat + first; n != 0; --n, first += kNormLanes, flat += kNormLanes) {
    SOTTO_FOR_VECTORS(k) {
      const uint64_t at = flat + k * kN;
      float* live = x + first + k * kN;
      const VF anchor = load(op.arrays.anchor + at);
      store(s.merged(op, live, anchor, at), live);
    }
  }
}

template <bool kPlain>
void step_groups(OuterStepOp& op, const Piece& p, uint64_t first, uint64_t n) {
  if (op.args.pass == OuterPass::kMerge) return merge_groups(op, p, first, n);
  return op.moves ? move_groups<kPlain>(op, p, first, n) : momentum_groups<kPlain>(op, p, first, n);
}

void outer_step(const KernelCall& call) {
  const auto& args = call.arguments<OuterStepArgs>();
  if (args.penalty.element) return scalar::outer_step(call);
  const bool fresh = call.of<kernels::OuterStep>().fresh.data != nullptr;
  return args.params || args.anchor_diff || fresh
             ? run_groups<OuterStepOp>(call, step_groups<false>)
             : run_groups<OuterStepOp>(call, step_groups<true>);
}

}  // namespace

void install_outer(KernelTable& table) {
  kernel_entry(table, KernelId::kOuterDelta) = outer_delta;
  kernel_entry(table, KernelId::kOuterNorm) = outer_norm;
  kernel_entry(table, KernelId::kOuterStep) = outer_step;
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
