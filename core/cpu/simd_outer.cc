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

enum class Payload { kNone, kDelta, kParams };

template <Payload kPayload, bool kStream>
void delta_groups(OuterDeltaOp& op, const Piece& piece, uint64_t first, uint64_t n) {
  const float* x = op.live(piece) + first;
  uint64_t flat = piece.flat + first;
  MF bad = no_lanes();
  for (; n != 0; --n, x += kNormLanes, flat += kNormLanes) {
    SOTTO_FOR_VECTORS(k) {
      const VF live = load(x + k * kN);
      const VF d = hn::Sub(load(op.anchor + flat + k * kN), live);
      add_lanes(op.lanes, k, hn::Mul(d, d));
      if constexpr (kPayload != Payload::kNone) {
        const VF y = kPayload == Payload::kParams ? live : d;
        store_or_stream<kStream>(y, op.y + flat + k * kN);
        bad = hn::Or(bad, hn::Not(finite(y)));
      }
    }
  }
  if (!hn::AllFalse(DF(), bad)) op.flags |= kFlagNonfinite;
}

template <Payload kPayload>
void delta_as(OuterDeltaOp& op, const Piece& p, uint64_t first, uint64_t n, bool stream) {
  return stream ? delta_groups<kPayload, true>(op, p, first, n)
                : delta_groups<kPayload, false>(op, p, first, n);
}

void outer_delta(const KernelCall& call) {
  bool streamed = false;
  run_groups<OuterDeltaOp>(call, [&](OuterDeltaOp& op, const Piece& p, uint64_t first, uint64_t n) {
    if (op.y == nullptr) return delta_groups<Payload::kNone, false>(op, p, first, n);
    const bool stream = streams(p.offset + first, op.y + p.flat + first);
    streamed |= stream;
    return op.params ? delta_as<Payload::kParams>(op, p, first, n, stream)
                     : delta_as<Payload::kDelta>(op, p, first, n, stream);
  });
  if (streamed) hwy::FlushStream();
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

// What a call of the step does. AnyStep looks it up; PlainStep is for the steps that are most
// common, whose loops ask nothing: of differences, all of them late, with merge "reset".
struct AnyStep {
  HWY_INLINE explicit AnyStep(const OuterStepOp& op)
      : params(op.args.params),
        anchor_diff(op.args.anchor_diff),
        has_gradient(op.element.has_gradient()),
        adds_gradient(op.element.adds_gradient()),
        takes_mean(op.element.takes_mean()),
        rule(op.args.rule),
        clip(op.args.clip),
        merge(op.args.merge),
        sum(op.arrays.sum != nullptr),
        fresh(op.arrays.fresh != nullptr),
        last_step(op.arrays.last_step != nullptr),
        x(op.tensors->data != nullptr),
        clipped(op.counts) {}

  const bool params, anchor_diff, has_gradient, adds_gradient, takes_mean;
  const OuterRule rule;
  const OuterClip clip;
  const OuterMerge merge;
  const bool sum, fresh, last_step, x, clipped;  // are there
};

template <OuterRule kRule, OuterPass kPass, OuterClip kClip>
struct PlainStep {
  HWY_INLINE explicit PlainStep(const OuterStepOp&) {}

  static constexpr bool params = false, anchor_diff = false;
  static constexpr bool adds_gradient = kPass != OuterPass::kUpdate;
  static constexpr bool has_gradient = adds_gradient || kRule != OuterRule::kHeavyBall;
  static constexpr bool takes_mean = false;
  static constexpr OuterRule rule = kRule;
  static constexpr OuterClip clip = kClip;
  static constexpr OuterMerge merge = OuterMerge::kReset;
  static constexpr bool sum = true, fresh = false, last_step = false, x = true;
  static constexpr bool clipped = kClip != OuterClip::kNone;
};

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

  VF mean, inv_lambda, last_alpha, freshness, beta, alpha, limit, minus_limit, shrink, a,
      one_minus_a;
};

HWY_INLINE VF load_or_zero(const float* values, uint64_t at) {
  return values != nullptr ? load(values + at) : hn::Zero(DF());
}

template <class Step>
HWY_INLINE VF pseudo_gradient(const Step& step, const StepNumbers& s, const OuterArrays& from,
                              VF sum, uint64_t at) {
  VF u = hn::Mul(sum, s.mean);
  if (step.params) u = hn::Sub(load_or_zero(from.start, at), u);
  VF d = u;
  if (step.anchor_diff) d = hn::Sub(u, hn::Mul(s.last_alpha, load_or_zero(from.last, at)));
  const VF v = hn::Mul(d, s.inv_lambda);
  if (!step.fresh) return v;
  const VF newer = hn::Sub(load(from.fresh + at), load_or_zero(from.previous, at));
  return hn::Add(v, hn::Mul(s.freshness, hn::Add(newer, hn::Sub(d, v))));
}

template <class Step>
HWY_INLINE VF sum_of(const Step& step, const OuterArrays& from, uint64_t at) {
  return step.sum ? load(from.sum + at) : hn::Zero(DF());
}

// New momentum, before the clip.
template <class Step>
void momentum_groups(OuterStepOp& op, const Piece& piece, uint64_t first, uint64_t n) {
  const Step step(op);
  const StepNumbers s(op, piece);
  const OuterArrays arrays = op.arrays;
  float* lanes = op.m_lanes;
  for (uint64_t flat = piece.flat + first; n != 0; --n, flat += kNormLanes) {
    SOTTO_FOR_VECTORS(k) {
      const uint64_t at = flat + k * kN;
      const VF g = pseudo_gradient(step, s, arrays, sum_of(step, arrays, at), at);
      const VF m = s.momentum(load(arrays.m + at), g);
      store(m, arrays.m + at);
      add_lanes(lanes, k, hn::Mul(m, m));
    }
  }
}

// Where an update writes beside its arrays.
struct UpdateLanes {
  float* changes;
  float* clipped;
};

// New momentum, which is stored. Returns the step of the anchor.
template <class Step>
HWY_INLINE VF step_of(const Step& step, const StepNumbers& s, float* all, VF g,
                      const UpdateLanes& lanes, uint64_t at, size_t k) {
  VF m = load(all + at);
  if (step.adds_gradient) m = s.momentum(m, g);
  const VF kept = s.limited(step.clip, m);
  if (step.clipped) {
    const MF changed = hn::Or(hn::Lt(kept, m), hn::Gt(kept, m));
    add_lanes(lanes.clipped, k, hn::IfThenElseZero(changed, set(1.0f)));
  }
  store(kept, all + at);
  return step.rule == OuterRule::kNesterov ? s.momentum(kept, g) : kept;
}

// One vector of an update. Returns the new anchor, which is stored.
template <class Step>
HWY_INLINE VF move(const Step& step, const StepNumbers& s, const OuterArrays& arrays,
                   const UpdateLanes& lanes, uint64_t at, size_t k) {
  const VF old = load(arrays.anchor + at);
  VF sum = hn::Zero(DF()), g = sum;
  if (step.has_gradient) {
    sum = sum_of(step, arrays, at);
    g = pseudo_gradient(step, s, arrays, sum, at);
  }
  VF by = g;
  if (step.rule != OuterRule::kNone) by = step_of(step, s, arrays.m, g, lanes, at, k);
  VF change = hn::Mul(s.alpha, by);
  VF anchor = hn::Sub(old, change);
  if (step.takes_mean) {
    anchor = hn::Mul(sum, s.mean);
    by = change = hn::Sub(old, anchor);
  }
  if (step.last_step) store(by, arrays.last_step + at);
  store(anchor, arrays.anchor + at);
  add_lanes(lanes.changes, k, hn::Mul(change, change));
  return anchor;
}

template <class Step>
HWY_INLINE VF merged(const Step& step, const StepNumbers& s, const float* x, VF anchor,
                     const float* x_launch, uint64_t at) {
  switch (step.merge) {
    case OuterMerge::kReset: return anchor;
    case OuterMerge::kLerp: return hn::Add(hn::Mul(s.a, load(x)), hn::Mul(s.one_minus_a, anchor));
    case OuterMerge::kAddProgress:
      return hn::Add(anchor, hn::Sub(load(x), load_or_zero(x_launch, at)));
    case OuterMerge::kPull: return hn::Add(hn::Mul(s.one_minus_a, load(x)), hn::Mul(s.a, anchor));
  }
  return anchor;
}

// kStream: of x, which the merge does not read.
template <class Step, bool kStream>
void move_groups(OuterStepOp& op, const Piece& piece, uint64_t first, uint64_t n) {
  const Step step(op);
  const StepNumbers s(op, piece);
  const OuterArrays arrays = op.arrays;
  const UpdateLanes lanes{op.step_lanes, op.clipped_lanes};
  float* x = op.live(piece);
  for (uint64_t flat = piece.flat + first; n != 0; --n, first += kNormLanes, flat += kNormLanes) {
    SOTTO_FOR_VECTORS(k) {
      const uint64_t at = flat + k * kN;
      const VF anchor = move(step, s, arrays, lanes, at, k);
      if (!step.x) continue;
      float* live = x + first + k * kN;
      store_or_stream<kStream>(merged(step, s, live, anchor, arrays.x_launch, at), live);
    }
  }
}

void merge_groups(OuterStepOp& op, const Piece& piece, uint64_t first, uint64_t n) {
  const AnyStep step(op);
  const StepNumbers s(op, piece);
  const OuterArrays arrays = op.arrays;
  float* x = op.live(piece);
  if (x == nullptr) return;
  for (uint64_t flat = piece.flat + first; n != 0; --n, first += kNormLanes, flat += kNormLanes) {
    SOTTO_FOR_VECTORS(k) {
      const uint64_t at = flat + k * kN;
      float* live = x + first + k * kN;
      store(merged(step, s, live, load(arrays.anchor + at), arrays.x_launch, at), live);
    }
  }
}

using StepLoop = void (*)(OuterStepOp&, const Piece&, uint64_t, uint64_t);

// The loops of a call. streamed: null if x does not go past the caches.
struct StepLoops {
  StepLoop usual = nullptr, streamed = nullptr;
};

template <OuterRule kRule, OuterPass kPass, OuterClip kClip>
StepLoops loops_of_plain() {
  using Step = PlainStep<kRule, kPass, kClip>;
  return {move_groups<Step, false>, move_groups<Step, true>};
}

template <OuterRule kRule>
StepLoops plain_loops(const OuterStepArgs& a) {
  if (a.pass == OuterPass::kUpdate) {
    if (a.clip == OuterClip::kNorm)
      return loops_of_plain<kRule, OuterPass::kUpdate, OuterClip::kNorm>();
    if (a.clip == OuterClip::kRms)
      return loops_of_plain<kRule, OuterPass::kUpdate, OuterClip::kRms>();
    return {};
  }
  if (a.clip == OuterClip::kNone)
    return loops_of_plain<kRule, OuterPass::kWhole, OuterClip::kNone>();
  if (a.clip == OuterClip::kCoordinate)
    return loops_of_plain<kRule, OuterPass::kWhole, OuterClip::kCoordinate>();
  return {};
}

StepLoops loops_of(const OuterStepOp& op) {
  const OuterStepArgs& a = op.args;
  const OuterArrays& arrays = op.arrays;
  const bool plain =
      !op.element.has_gradient() ||
      (arrays.sum != nullptr && arrays.fresh == nullptr && !a.params && !a.anchor_diff);
  if (a.pass == OuterPass::kMerge) return {merge_groups};
  if (a.pass == OuterPass::kMomentum) {
    using Plain = PlainStep<OuterRule::kHeavyBall, OuterPass::kMomentum, OuterClip::kNone>;
    return {plain ? momentum_groups<Plain> : momentum_groups<AnyStep>};
  }
  StepLoops found;
  const bool there = op.tensors->data != nullptr && (op.counts || a.clip == OuterClip::kNone);
  if (plain && there && a.merge == OuterMerge::kReset && arrays.last_step == nullptr) {
    if (a.rule == OuterRule::kHeavyBall) found = plain_loops<OuterRule::kHeavyBall>(a);
    if (a.rule == OuterRule::kNesterov) found = plain_loops<OuterRule::kNesterov>(a);
  }
  if (found.usual == nullptr) found.usual = move_groups<AnyStep, false>;
  return found;
}

void outer_step(const KernelCall& call) {
  if (call.arguments<OuterStepArgs>().penalty.element) return scalar::outer_step(call);
  StepLoops loops;
  bool streamed = false;
  run_groups<OuterStepOp>(call, [&](OuterStepOp& op, const Piece& p, uint64_t first, uint64_t n) {
    if (loops.usual == nullptr) loops = loops_of(op);
    const bool stream = loops.streamed != nullptr && streams(p.offset + first, op.live(p) + first);
    streamed |= stream;
    return (stream ? loops.streamed : loops.usual)(op, p, first, n);
  });
  if (streamed) hwy::FlushStream();
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
