// Numbers of outer optimizers that are made once per boundary, segment or fragment, for every
// device (outer.h).
#pragma once

#include <cmath>

#include "core/kernels/elements.h"
#include "core/kernels/outer.h"

namespace sotto {

// float(sqrt(sum)).
SOTTO_HOST_DEVICE inline float float_root(double sum) { return static_cast<float>(std::sqrt(sum)); }

// What the messages of all ranks say together.
struct OuterVotes {
  uint32_t ranks = 0;  // that take part
  bool flagged = false;
};

SOTTO_HOST_DEVICE inline float outer_mean(uint32_t divided, uint32_t ranks) {
  if (divided == 0) return 1.0f;
  return ranks == 0 ? 0.0f : static_cast<float>(static_cast<double>(divided) / ranks);
}

SOTTO_HOST_DEVICE inline uint32_t outer_word(const OuterFactorsArgs& a, const OuterVotes& votes) {
  const bool nothing = votes.ranks == 0 && a.freshness == 0;
  return (a.fails && votes.flagged) || nothing ? kSkipNonfinite : kCommit;
}

// Without an average there is nothing to divide, and no gap that its moving average has seen.
SOTTO_HOST_DEVICE inline OuterPenaltyArgs outer_penalty(const OuterFactorsArgs& a,
                                                        const OuterVotes& votes) {
  return votes.ranks == 0 ? OuterPenaltyArgs{} : a.penalty;
}

// Of an anchor that has not moved in a boundary.
SOTTO_HOST_DEVICE inline OuterSegment outer_unmoved(const OuterSegment& segment) {
  return {segment.average_gap, 0, 0};
}

// kOuterTell. host: what the host has given; inner_sum may be null.
SOTTO_HOST_DEVICE inline OuterMessage outer_message(const OuterMessage& host, double delta_sum,
                                                    float gap, const double* inner_sum,
                                                    uint32_t flags) {
  OuterMessage message = host;
  message.delta_sum = delta_sum;
  message.gap = gap;
  message.inner_norm = inner_sum == nullptr ? 0.0f : float_root(*inner_sum);
  if (flags != 0) message.weight = 0;
  message.flags = flags;
  return message;
}

// kOuterFactors: what all segments share.
SOTTO_HOST_DEVICE inline OuterNumbers outer_numbers(const OuterFactorsArgs& a,
                                                    const OuterInputs& inputs, uint32_t ranks,
                                                    float last_alpha) {
  OuterNumbers n;
  n.phi = a.clip_by_gamma ? inputs.phi * inputs.gamma : inputs.phi;
  n.gamma = a.normalised ? inputs.gamma : 1.0;
  n.mean = outer_mean(a.divided, ranks);
  n.alpha = static_cast<float>(a.alpha * n.gamma);
  n.last_alpha = last_alpha;
  n.beta = static_cast<float>(a.beta);
  n.freshness = static_cast<float>(a.freshness);
  n.limit = static_cast<float>(n.phi);
  n.ranks = ranks;
  return n;
}

// Lambda of a gap, before the floor. eps: what is added to the unit.
SOTTO_HOST_DEVICE inline double gap_penalty(double gap, double unit, double eps,
                                            double lambda_max) {
  if (gap == 0) return 1;
  const double lambda = 1 + gap / (unit + eps);
  return lambda < 1 ? 1 : lambda > lambda_max ? lambda_max : lambda;
}

SOTTO_HOST_DEVICE inline double with_floor(double lambda, double floor) {
  return lambda < floor ? floor : lambda;
}

SOTTO_HOST_DEVICE inline float outer_inv_lambda(double gamma, double lambda) {
  return static_cast<float>(1.0 / (gamma * lambda));
}

// Whether a rank has measured the round's first inner step. A step that was not finite may have
// been made good since.
SOTTO_HOST_DEVICE inline bool has_inner_norm(const OuterMessage& message) {
  return message.weight != 0 && std::isfinite(message.inner_norm);
}

// The unit of penalty "gap_inner".
SOTTO_HOST_DEVICE inline double inner_unit(const OuterFactorsArgs& a, const OuterInputs& inputs,
                                           const OuterMessage* messages) {
  uint32_t ranks = 0;
  for (uint32_t r = 0; r < a.world; ++r) ranks += has_inner_norm(messages[r]) ? 1 : 0;
  const float sum = sum_of_ranks(a.world, [&](uint32_t r) {
    return has_inner_norm(messages[r]) ? messages[r].inner_norm : 0.0f;
  });
  const float mean = sum * outer_mean(1, ranks);
  return inputs.period * static_cast<double>(mean);
}

// kOuterFactors: a segment of `count` elements. unit: of penalties "gap_rel" and "gap_inner".
SOTTO_HOST_DEVICE inline OuterFactor outer_factor(const OuterPenaltyArgs& p, double gamma,
                                                  const OuterMessage* messages, double unit,
                                                  uint64_t count, OuterSegment* segment) {
  OuterFactor f;
  if (p.stale) f.gap = static_cast<double>(p.consensus ? messages[0].gap : segment->gap);
  const OuterPenalty kind = p.element ? OuterPenalty::kNone : p.kind;
  if (kind == OuterPenalty::kConst) f.lambda = p.constant;
  if (kind == OuterPenalty::kGapEma) {
    double& average = segment->average_gap;
    average = average == 0 ? f.gap : 0.9 * average + 0.1 * f.gap;
    unit = average;
  }
  if (kind != OuterPenalty::kNone && kind != OuterPenalty::kConst) {
    const double eps = p.eps * std::sqrt(static_cast<double>(count));
    f.unit = unit;
    f.lambda = gap_penalty(f.gap, unit, eps, p.lambda_max);
  }
  if (!p.element) f.lambda = with_floor(f.lambda, p.floor);
  f.inv_lambda = outer_inv_lambda(gamma, f.lambda);
  return f;
}

// kOuterLimit. sum: of the squares of all new momentum.
SOTTO_HOST_DEVICE inline void limit_momentum(const OuterLimitArgs& a, double sum, OuterNumbers* n) {
  if (a.clip == OuterClip::kRms) {
    const double mean = a.elements == 0 ? 0.0 : sum / static_cast<double>(a.elements);
    n->limit = static_cast<float>(n->phi * static_cast<double>(float_root(mean)));
  }
  if (a.clip == OuterClip::kNorm) {
    const float norm = float_root(sum);
    n->shrink = static_cast<double>(norm) > n->phi
                    ? static_cast<float>(n->phi / static_cast<double>(norm))
                    : 1.0f;
  }
}

// kOuterGap.
SOTTO_HOST_DEVICE inline void keep_change(double step_sum, double clipped, OuterSegment* segment,
                                          OuterFactor* factor) {
  factor->change = float_root(step_sum);
  factor->clipped = clipped;
  segment->gap = factor->change;
}

}  // namespace sotto
