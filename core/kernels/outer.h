// Outer optimizers (specification co2-overlap): what a rank sends of its local steps, and the step
// of the anchor with the average of all ranks (section 13). Every array that is "flat" has the flat
// space of a fragment: its tensors one after the other.
#pragma once

#include "core/base/outer.h"
#include "core/kernels/elements.h"
#include "core/kernels/schema.h"

namespace sotto {

// What every rank tells the others with each average (section 11.6).
struct OuterMessage {
  double delta_sum;      // sum of squares of what the rank averages: Delta
  double loss;           // the trainer's; NaN: not given
  uint64_t tokens;       // the trainer's
  uint64_t anchor_hash;  // 0: not computed
  float gap;             // length of the anchor's last update before the launch
  float inner_norm;      // length of the round's first inner step; 0: not measured
  float weight;          // of the rank in the average: 0 or 1
  uint32_t flags;        // kFlagNonfinite: the payload was not finite
  uint32_t step_us;      // an inner step: the mean of those that were measured
  uint32_t network_us;   // the last averages of all fragments, one after the other
  uint32_t votes;
  uint16_t version;
  uint16_t asks;  // kOuterAsks..., or-ed
};
static_assert(sizeof(OuterMessage) == 64);
inline constexpr uint16_t kOuterMessageVersion = 1;
inline constexpr uint16_t kOuterAsksPeriod = 1;  // a period "auto" that is measured anew

// Of a segment, which is a fragment, or with granularity "tensor" one of its tensors: lives across
// boundaries.
struct OuterSegment {
  double average_gap = 0;  // C of penalty "gap_ema"; 0: none yet
  float gap = 0;           // length of the anchor's last update
  float alpha = 0;         // outer learning rate of that update
};

// Of a segment in one boundary.
struct OuterFactor {
  double lambda = 1;     // staleness penalty
  double unit = 0;       // what the gap is compared with
  double gap = 0;        // the gap that the penalty takes
  double clipped = 0;    // elements whose momentum the limit has changed
  float inv_lambda = 1;  // what the pseudo-gradient is multiplied with
  float change = 0;      // length of the anchor's update
};

// Numbers of one boundary: written by OuterFactors, read by every later kernel of it.
struct OuterNumbers {
  double phi = 0;        // threshold of the clip in this boundary, before it is rounded
  double gamma = 1;      // what Lambda is multiplied with: not 1 where the rule is normalised
  float mean = 1;        // what the sum over ranks is multiplied with
  float alpha = 1;       // outer learning rate, times gamma where the rule is normalised
  float last_alpha = 0;  // that of the anchor's last update
  float beta = 0;        // outer momentum
  float freshness = 0;   // share of the rank's own newest Delta
  float limit = 0;       // phi of the clip in this boundary
  float shrink = 1;      // what momentum is multiplied with: clip "norm"
  uint32_t ranks = 0;    // that take part
};

// What the host gives for one boundary.
struct OuterInputs {
  double gamma = 1;  // inner learning rate of the consuming step
  double phi = 0;    // clip threshold before units: section 4.4
  // Inner steps of a round when the average was launched: of penalty "gap_inner".
  double period = 1;
};

struct OuterDeltaArgs {
  bool params = false;  // the payload is x itself
};

struct OuterMessageArgs {
  uint64_t blocks = 0;  // of sums
};

// What a late pseudo-gradient is divided by, Lambda (section 4.3).
struct OuterPenaltyArgs {
  OuterPenalty kind = OuterPenalty::kNone;
  // The gap is that of the anchor's last update: the average was launched before it. False: 0.
  bool stale = false;
  bool consensus = false;  // rank 0's gap, which came with the average
  bool element = false;    // "gap_rel" of each element, which OuterStep makes; no other kind
  double constant = 1;     // Lambda of "const"
  double lambda_max = 16;
  double floor = 0;    // smallest Lambda; 0: none
  double eps = 1e-12;  // times the square root of the elements that a gap is of

  // Whether OuterFactors compares gaps with norms of segments.
  SOTTO_HOST_DEVICE bool needs_norms() const { return kind == OuterPenalty::kGapRel && !element; }
};

struct OuterFactorsArgs {
  const NormRange* ranges = nullptr;  // per segment: its norm blocks and elements
  uint64_t n = 0;                     // segments, 1 or more
  uint32_t world = 1;
  OuterPenaltyArgs penalty;
  bool normalised = false;     // momentum in the units of gradients (lr_normalised)
  bool clip_by_gamma = false;  // phi * gamma
  // By what the sum over ranks is divided already: 1: nothing; the world: a codec's mean, with
  // zeros for ranks that do not take part; 0: the number of those that do.
  uint32_t divided = 1;
  bool fails = false;  // a rank whose payload was not finite is an error
  double alpha = 1, beta = 0, freshness = 0;
};

struct OuterNormArgs {
  uint32_t world = 1;
  uint32_t divided = 1;  // as OuterFactorsArgs
};

struct OuterLimitArgs {
  uint64_t blocks = 0;  // of sums
  uint64_t elements = 0;
  OuterClip clip = OuterClip::kRms;
};

struct OuterGapArgs {
  const NormRange* ranges = nullptr;  // as OuterFactorsArgs
  uint64_t n = 0;
};

// Which part of a boundary's arithmetic a call does. Clips of the whole fragment need all of the
// new momentum before the anchor moves. kMerge: the anchor stays.
enum class OuterPass : uint8_t { kWhole = 1, kMomentum = 2, kUpdate = 3, kMerge = 4 };

struct OuterStepArgs {
  OuterPass pass = OuterPass::kWhole;
  OuterRule rule = OuterRule::kHeavyBall;
  OuterMerge merge = OuterMerge::kReset;
  OuterClip clip = OuterClip::kNone;
  bool anchor_diff = false;      // the anchor's last step is taken out of the average
  bool params = false;           // the average is one of parameters
  uint32_t factors = 1;          // one for all tensors, or one for each
  OuterPenaltyArgs penalty;      // as OuterFactorsArgs
  float a = 0, one_minus_a = 1;  // of merges "lerp" and "pull"
};

namespace kernels {

inline uint64_t outer_block_bytes(const void* args) {
  return static_cast<const OuterMessageArgs*>(args)->blocks * 4;
}
inline uint64_t outer_message_bytes(const void*) { return sizeof(OuterMessage); }
inline uint64_t outer_messages_bytes(const void* args) {
  return static_cast<const OuterFactorsArgs*>(args)->world * sizeof(OuterMessage);
}
inline uint64_t outer_norm_messages_bytes(const void* args) {
  return static_cast<const OuterNormArgs*>(args)->world * sizeof(OuterMessage);
}
inline uint64_t outer_inputs_bytes(const void*) { return sizeof(OuterInputs); }
inline uint64_t outer_numbers_bytes(const void*) { return sizeof(OuterNumbers); }
inline uint64_t outer_segment_bytes(const void* args) {
  return static_cast<const OuterFactorsArgs*>(args)->n * sizeof(OuterSegment);
}
inline uint64_t outer_factor_bytes(const void* args) {
  return static_cast<const OuterFactorsArgs*>(args)->n * sizeof(OuterFactor);
}
inline uint64_t outer_gap_bytes(const void* args) {
  return static_cast<const OuterGapArgs*>(args)->n * sizeof(OuterSegment);
}
inline uint64_t outer_gap_factor_bytes(const void* args) {
  return static_cast<const OuterGapArgs*>(args)->n * sizeof(OuterFactor);
}
inline uint64_t outer_step_factor_bytes(const void* args) {
  return static_cast<const OuterStepArgs*>(args)->factors * sizeof(OuterFactor);
}
inline uint64_t outer_limit_bytes(const void* args) {
  return static_cast<const OuterLimitArgs*>(args)->blocks * 4;
}

// y = anchor - x, or y = x with `params`; flags |= kFlagNonfinite if a y is not finite. Block sums
// of d*d, where d = anchor - x in either case. y absent: only the sums, and flags may be absent.
// x: list. anchor, y: flat.
template <class T>
struct OuterDeltaOperands {
  T x{}, anchor{}, y{}, sums{}, flags{};
};
struct OuterDelta {
  template <class T>
  using Operands = OuterDeltaOperands<T>;
  using Args = OuterDeltaArgs;
  static constexpr OuterDeltaOperands<OperandSpec> kOperands = {
      .x = reads("x", Touched::kList),
      .anchor = reads("anchor", Touched::kFlat),
      .y = optional(writes("y", Touched::kFlat)),
      .sums = writes("sums", Touched::kBlocks),
      .flags = optional(raised_flags())};
  static constexpr Division kDivision = Division::kNorms;
};

// This rank's message: what the host gives, and what is known on the device.
//   delta_sum = float64 sum of all blocks; gap = segments[0].gap; inner_norm = float(sqrt(float64
//   sum of inner blocks)), 0 without them; flags = *flags; weight = the host's, 0 if flags are
//   raised; word = weight is 0 ? kSkipNonfinite : kCommit.
// host: OuterMessage, of which delta_sum, gap, inner_norm and flags are not read. segments:
// OuterSegment[]. inner_sum: double, sum of squares of the first inner step; optional.
template <class T>
struct OuterTellOperands {
  T sums{}, flags{}, segments{}, inner_sum{}, host{}, message{}, word{};
};
struct OuterTell {
  template <class T>
  using Operands = OuterTellOperands<T>;
  using Args = OuterMessageArgs;
  static constexpr OuterTellOperands<OperandSpec> kOperands = {
      .sums = long_as(reads("sums", Touched::kArguments), outer_block_bytes),
      .flags = reads("flags", Touched::kOne, Element::kU32),
      .segments = long_as(reads("segments", Touched::kArguments, Element::kU8),
                          [](const void*) -> uint64_t { return sizeof(OuterSegment); }),
      .inner_sum = optional(reads("inner_sum", Touched::kOne, Element::kF64)),
      .host = long_as(reads("host", Touched::kArguments, Element::kU8), outer_message_bytes),
      .message = long_as(writes("message", Touched::kArguments, Element::kU8), outer_message_bytes),
      .word = writes("word", Touched::kOne, Element::kU32)};
  static constexpr Division kDivision = Division::kNever;
};

// sum = float64 sum of the blocks of `sums`, in ascending order.
template <class T>
struct OuterSumOperands {
  T sums{}, sum{};
};
struct OuterSum {
  template <class T>
  using Operands = OuterSumOperands<T>;
  using Args = OuterMessageArgs;
  static constexpr OuterSumOperands<OperandSpec> kOperands = {
      .sums = long_as(reads("sums", Touched::kArguments), outer_block_bytes),
      .sum = writes("sum", Touched::kOne, Element::kF64)};
  static constexpr Division kDivision = Division::kNever;
};

// Numbers and factors of a boundary.
//   ranks = messages with weight not 0. mean = float(divided / ranks), 0 without ranks; 1 if
//   divided is 0. numbers.gamma = normalised ? gamma : 1. alpha = float(args.alpha *
//   numbers.gamma); last_alpha = segments[0].alpha, which becomes alpha. beta, freshness = float of
//   the arguments. numbers.phi = phi * gamma if clip_by_gamma, else phi; limit =
//   float(numbers.phi); shrink = 1. word = fails and a flag is raised, or no rank takes part and
//   freshness is 0 ? kSkipNonfinite : kCommit. Unless it is kCommit the anchor does not move: gap
//   and alpha of segments become 0. Where no rank takes part the penalty is "none", without a
//   floor.
// Per segment, in float64:
//   gap = !stale ? 0 : consensus ? messages[0].gap : segment.gap
//   penalty "none": Lambda = 1.  "const": Lambda = constant.  Both: unit = 0.
//   "gap_ema": average_gap = average_gap == 0 ? gap : 0.9*average_gap + 0.1*gap; unit = average_gap
//   "gap_rel": unit = float(sqrt(sum of the segment's blocks of `sums`))
//   "gap_inner": unit = period * (float32 sum of inner_norm over the ranks that take part and
//     have a finite one, in ascending order, as sum_of_ranks, times float(1 / those), in float32)
//   "gap_*": Lambda = gap == 0 ? 1 : clamp(1 + gap / (unit + eps * sqrt(count)), 1, lambda_max)
//   Lambda = max(Lambda, floor). NaN stays NaN.
//   inv_lambda = float(1 / (numbers.gamma * Lambda)).
// element: as with penalty "none" and no floor; the penalty is OuterStep's.
// messages: OuterMessage[world]. inputs: OuterInputs. segments: OuterSegment[n]. factors:
// OuterFactor[n], with clipped and change 0. sums: of OuterNorm, for "gap_rel" of segments.
template <class T>
struct OuterFactorsOperands {
  T messages{}, inputs{}, sums{}, segments{}, factors{}, numbers{}, word{};
};
struct OuterFactors {
  template <class T>
  using Operands = OuterFactorsOperands<T>;
  using Args = OuterFactorsArgs;
  static constexpr OuterFactorsOperands<OperandSpec> kOperands = {
      .messages =
          long_as(reads("messages", Touched::kArguments, Element::kU8), outer_messages_bytes),
      .inputs = long_as(reads("inputs", Touched::kArguments, Element::kU8), outer_inputs_bytes),
      .sums = optional(reads("sums", Touched::kRangeBlocks)),
      .segments =
          long_as(updates("segments", Touched::kArguments, Element::kU8), outer_segment_bytes),
      .factors = long_as(writes("factors", Touched::kArguments, Element::kU8), outer_factor_bytes),
      .numbers = long_as(writes("numbers", Touched::kArguments, Element::kU8), outer_numbers_bytes),
      .word = writes("word", Touched::kOne, Element::kU32)};
  static constexpr Division kDivision = Division::kNever;
};

// Block sums of u*u: u = sum * mean, or with an anchor (payload "params") u = anchor - sum * mean.
// mean: as OuterFactors makes it of the messages, from `divided`.
template <class T>
struct OuterNormOperands {
  T sum{}, anchor{}, messages{}, sums{};
};
struct OuterNorm {
  template <class T>
  using Operands = OuterNormOperands<T>;
  using Args = OuterNormArgs;
  static constexpr OuterNormOperands<OperandSpec> kOperands = {
      .sum = reads("sum", Touched::kFlat),
      .anchor = optional(reads("anchor", Touched::kFlat)),
      .messages =
          long_as(reads("messages", Touched::kArguments, Element::kU8), outer_norm_messages_bytes),
      .sums = writes("sums", Touched::kBlocks)};
  static constexpr Division kDivision = Division::kNorms;
};

// The outer step (section 13), every product and sum rounded once:
//  - u = sum * mean, 0 where sum is absent. params: u = launch_anchor - u, with the anchor of now
//    where launch_anchor is absent.
//  - d = u. anchor_diff: d = u - last_alpha * last; last = last_step, or m where that is absent.
//    It is not set where u is of the anchor of now, which has that step already.
//  - v = d * inv_lambda, of factor 0 or, if there are more, of factor `tensor`; v = d where factors
//    are absent.
//  - element: v = d * float(1 / (numbers.gamma * Lambda)) instead, in float64: Lambda = max(L,
//    floor), L = 1 if G is 0, else min(1 + G / (|u| + eps), lambda_max); G = stale ? |last_alpha *
//    last| : 0, that product in float32.
//  - g = v. fresh is there: g = v + freshness * ((fresh - previous) + (d - v)); previous absent: 0.
//  - m = beta * m + g.
//  - Clip: coordinate and rms: m = -limit if m < -limit, limit if m > limit; norm: m = m * shrink.
//  - step = nesterov ? beta * m + g : m. Rule "none": step = g, and there is no m and no clip.
//  - change = alpha * step; anchor = anchor - change; last_step = step, where it is there. Rule
//    "none" with params: anchor = sum * mean, step = change = old anchor - new anchor.
//  - Merge, where x is there: reset: x = anchor. lerp: x = a * x + one_minus_a * anchor.
//    add_progress: x = anchor + (x - x_launch). pull: x = one_minus_a * x + a * anchor.
//
// step_sums: block sums of change * change. clipped: per norm block, float32 number of elements
// whose m the clip has made smaller or larger.
//
// Pass kMomentum: up to m = beta * m + g, which is stored, and m_sums, block sums of m * m, which
// no other pass makes. Pass kUpdate: from the clip on, with the stored m; with anchor_diff or
// element last_step is there if g is needed, which is so with Nesterov's momentum. Pass kMerge: the
// merge alone. Rule "none" has no passes kMomentum and kUpdate.
//
// sum, launch_anchor, last_step, fresh, previous, x_launch, m, anchor: flat. x: list. numbers:
// OuterNumbers. factors: OuterFactor[]. Pass kMerge has neither.
template <class T>
struct OuterStepOperands {
  T sum{}, launch_anchor{}, last_step{}, fresh{}, previous{}, x_launch{}, numbers{}, factors{}, m{},
      anchor{}, x{}, step_sums{}, m_sums{}, clipped{};
};
struct OuterStep {
  template <class T>
  using Operands = OuterStepOperands<T>;
  using Args = OuterStepArgs;
  static constexpr OuterStepOperands<OperandSpec> kOperands = {
      .sum = optional(reads("sum", Touched::kFlat)),
      .launch_anchor = optional(reads("launch_anchor", Touched::kFlat)),
      .last_step = optional(updates("last_step", Touched::kFlat)),
      .fresh = optional(reads("fresh", Touched::kFlat)),
      .previous = optional(reads("previous", Touched::kFlat)),
      .x_launch = optional(reads("x_launch", Touched::kFlat)),
      .numbers = optional(
          long_as(reads("numbers", Touched::kArguments, Element::kU8), outer_numbers_bytes)),
      .factors = optional(
          long_as(reads("factors", Touched::kArguments, Element::kU8), outer_step_factor_bytes)),
      .m = optional(updates("m", Touched::kFlat)),
      .anchor = optional(updates("anchor", Touched::kFlat)),
      .x = optional(updates("x", Touched::kList)),
      .step_sums = optional(writes("step_sums", Touched::kBlocks)),
      .m_sums = optional(writes("m_sums", Touched::kBlocks)),
      .clipped = optional(writes("clipped", Touched::kBlocks))};
  static constexpr Division kDivision = Division::kNorms;
};

// The limit of a clip that the whole fragment decides, of the float64 sum of all blocks of m * m.
//   rms: limit = float(phi * float(sqrt(sum / elements))), 0 without elements.
//   norm: with n = float(sqrt(sum)): shrink = n > phi ? float(phi / n) : 1.
template <class T>
struct OuterLimitOperands {
  T m_sums{}, numbers{};
};
struct OuterLimit {
  template <class T>
  using Operands = OuterLimitOperands<T>;
  using Args = OuterLimitArgs;
  static constexpr OuterLimitOperands<OperandSpec> kOperands = {
      .m_sums = long_as(reads("m_sums", Touched::kArguments), outer_limit_bytes),
      .numbers =
          long_as(updates("numbers", Touched::kArguments, Element::kU8), outer_numbers_bytes)};
  static constexpr Division kDivision = Division::kNever;
};

// Per segment: change = float(sqrt(float64 sum of its blocks of step_sums)), of the factor, and the
// segment's gap; clipped = float64 sum of its blocks of `clipped`, 0 without them.
template <class T>
struct OuterGapOperands {
  T step_sums{}, clipped{}, segments{}, factors{};
};
struct OuterGap {
  template <class T>
  using Operands = OuterGapOperands<T>;
  using Args = OuterGapArgs;
  static constexpr OuterGapOperands<OperandSpec> kOperands = {
      .step_sums = reads("step_sums", Touched::kRangeBlocks),
      .clipped = optional(reads("clipped", Touched::kRangeBlocks)),
      .segments = long_as(updates("segments", Touched::kArguments, Element::kU8), outer_gap_bytes),
      .factors =
          long_as(updates("factors", Touched::kArguments, Element::kU8), outer_gap_factor_bytes)};
  static constexpr Division kDivision = Division::kNever;
};

}  // namespace kernels
}  // namespace sotto
