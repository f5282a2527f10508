// The arithmetic of outer optimizers' elements, for every device (outer.h).
#pragma once

#include "core/kernels/outer_steps.h"

namespace sotto {

// The average over ranks, of parameters less the anchor: kOuterNorm, kOuterStep.
SOTTO_HOST_DEVICE inline float outer_average(bool params, float sum, float mean, float anchor) {
  const float average = sum * mean;
  return params ? anchor - average : average;
}

// The memory that a call of kOuterStep works on; null: it does not.
struct OuterArrays {
  SOTTO_HOST_DEVICE OuterArrays(const OuterStepArgs& a,
                                const kernels::OuterStepOperands<Operand>& o)
      : m(a.rule == OuterRule::kNone ? nullptr : o.m.flat<float>()),
        anchor(o.anchor.flat<float>()),
        last_step(o.last_step.flat<float>()),
        sum(o.sum.flat<const float>()),
        fresh(o.fresh.flat<const float>()),
        previous(o.previous.flat<const float>()),
        x_launch(o.x_launch.flat<const float>()) {
    if (a.params) start = o.launch_anchor.data == nullptr ? anchor : o.launch_anchor.flat<float>();
    if (a.anchor_diff || (a.penalty.element && a.penalty.stale))
      last = last_step == nullptr ? m : last_step;
  }

  float* m;
  float* anchor;
  float* last_step;
  const float* sum;
  const float* fresh;
  const float* previous;
  const float* x_launch;
  const float* start = nullptr;  // what an average of parameters is taken from
  const float* last = nullptr;   // the anchor's last step
};

// What an element's pseudo-gradient is made of; what is not there is 0.
struct OuterSources {
  float sum, start, last, fresh, previous;
};

// What an update leaves.
struct OuterMove {
  float m, step, anchor, change;
  bool clipped = false;
};

// A call of kOuterStep, for one element after the other.
struct OuterElement {
  // numbers may be null in pass kMerge.
  SOTTO_HOST_DEVICE OuterElement(const OuterStepArgs& args, const OuterNumbers* numbers,
                                 bool with_fresh)
      : a(args), is_fresh(with_fresh) {
    if (numbers != nullptr) n = *numbers;
  }

  // Whether the call looks at pseudo-gradients.
  SOTTO_HOST_DEVICE bool has_gradient() const {
    return a.pass != OuterPass::kUpdate || a.rule != OuterRule::kHeavyBall;
  }
  SOTTO_HOST_DEVICE bool adds_gradient() const { return a.pass != OuterPass::kUpdate; }
  // Whether the anchor becomes the mean itself.
  SOTTO_HOST_DEVICE bool takes_mean() const { return a.rule == OuterRule::kNone && a.params; }

  // g. inv_lambda: of the segment.
  SOTTO_HOST_DEVICE float gradient(const OuterSources& s, float inv_lambda) const {
    const float u = outer_average(a.params, s.sum, n.mean, s.start);
    const float moved = n.last_alpha * s.last;
    const float d = a.anchor_diff ? u - moved : u;
    const float v = d * (a.penalty.element ? element_inv_lambda(u, moved) : inv_lambda);
    return is_fresh ? v + n.freshness * ((s.fresh - s.previous) + (d - v)) : v;
  }
  SOTTO_HOST_DEVICE float element_inv_lambda(float u, float moved) const {
    const OuterPenaltyArgs& p = a.penalty;
    const double gap = p.stale ? static_cast<double>(std::fabs(moved)) : 0.0;
    const double unit = static_cast<double>(std::fabs(u));
    return outer_inv_lambda(n.gamma,
                            with_floor(gap_penalty(gap, unit, p.eps, p.lambda_max), p.floor));
  }

  SOTTO_HOST_DEVICE float momentum(float m, float g) const { return n.beta * m + g; }
  SOTTO_HOST_DEVICE float limited(float m) const {
    if (a.clip == OuterClip::kNone) return m;
    if (a.clip == OuterClip::kNorm) return m * n.shrink;
    return m < -n.limit ? -n.limit : m > n.limit ? n.limit : m;
  }
  // From the clip on. m: the new momentum.
  SOTTO_HOST_DEVICE OuterMove move(float m, float g, float sum, float anchor) const {
    OuterMove to{m, g, anchor, 0.0f};
    if (takes_mean()) {
      to.anchor = sum * n.mean;
      to.step = to.change = anchor - to.anchor;
      return to;
    }
    if (a.rule != OuterRule::kNone) {
      to.m = limited(m);
      to.clipped = to.m < m || to.m > m;
      to.step = a.rule == OuterRule::kNesterov ? momentum(to.m, g) : to.m;
    }
    to.change = n.alpha * to.step;
    to.anchor = anchor - to.change;
    return to;
  }

  SOTTO_HOST_DEVICE float merged(float x, float anchor, float x_launch) const {
    switch (a.merge) {
      case OuterMerge::kReset: return anchor;
      case OuterMerge::kLerp: return a.a * x + a.one_minus_a * anchor;
      case OuterMerge::kAddProgress: return anchor + (x - x_launch);
      case OuterMerge::kPull: return a.one_minus_a * x + a.a * anchor;
    }
    return anchor;
  }

  const OuterStepArgs& a;
  bool is_fresh;
  OuterNumbers n;
};

// inv_lambda of a piece's elements. factors: OuterFactor[], or null.
SOTTO_HOST_DEVICE inline float inv_lambda_of(const OuterStepArgs& a, const OuterFactor* factors,
                                             const Piece& piece) {
  if (factors == nullptr) return 1.0f;
  return factors[a.factors > 1 ? piece.tensor : 0].inv_lambda;
}

}  // namespace sotto
