// LAMB (arXiv 1904.00962), specification section 4, and the warm-up of 1-bit LAMB (section 7).
#pragma once

#include "core/kernels/elements.h"
#include "core/kernels/norms.h"

namespace sotto {

struct LambGroupScalars : GroupScalars {
  double lamb_lr = 0;    // lr, times sqrt(1 - b2^t) / (1 - b1^t) with bias correction
  double max_coeff = 0;  // bounds of the trust ratio
  double min_coeff = 0;
  double coeff_beta = 0;  // of the moving average of trust ratios
  uint32_t eps_inside_sqrt = 0;
};

struct TensorArgs {
  const NormRange* ranges;  // one per tensor
  uint64_t n;
  bool average;
};

namespace kernels {

// Pass 1: m and v as in Adam (no weight decay in g');
//   den = eps_inside_sqrt ? sqrt(v + eps) : sqrt(v) + eps;  u = m / den, then u = u + wd*p if wd
//   != 0;  block sums of p*p and u*u (masked elements count in both: weight decay moves them).
// g: source. m, v: flat. p, u: lists. u is kept for LambUpdate; it may lie exactly where a g of
// float32 lies (g is then gone).
template <class T>
struct LambMomentsOperands {
  T g{}, m{}, v{}, p{}, p_sums{}, u_sums{}, scalars{}, clip{}, valid{}, u{};
};
struct LambMoments {
  template <class T>
  using Operands = LambMomentsOperands<T>;
  using Args = SourceArgs;
  static constexpr LambMomentsOperands<OperandSpec> kOperands = {
      .g = replaced(source<SourceArgs>("g")),
      .m = updates("m", Touched::kFlat),
      .v = updates("v", Touched::kFlat),
      .p = reads("p", Touched::kList),
      .p_sums = writes("p_sums", Touched::kBlocks),
      .u_sums = writes("u_sums", Touched::kBlocks),
      .scalars = group_scalars<LambGroupScalars>(),
      .clip = clip_factor(),
      .valid = valid_bits(),
      .u = writes("u", Touched::kList)};
  static constexpr Division kDivision = Division::kNorms;
};

// Per tensor: wn, un = norms; c = 1; if both are not 0: c = wn/un, bounded above by max_coeff, then
// below by min_coeff. average = 1 and c != 1: c_avg = coeff_beta*c_avg + (1-coeff_beta)*c.
// step_size = float(lamb_lr * c).
// states: TensorState[], touched with average = 1 alone. steps: TensorStep[].
template <class T>
struct LambScalarsOperands {
  T p_sums{}, u_sums{}, scalars{}, states{}, steps{};
};
struct LambScalars {
  template <class T>
  using Operands = LambScalarsOperands<T>;
  using Args = TensorArgs;
  static constexpr LambScalarsOperands<OperandSpec> kOperands = {
      .p_sums = reads("p_sums", Touched::kRangeBlocks),
      .u_sums = reads("u_sums", Touched::kRangeBlocks),
      .scalars = group_scalars<LambGroupScalars>(),
      .states = optional(updates("states", Touched::kTensors, Element::kTensorState)),
      .steps = writes("steps", Touched::kTensors, Element::kTensorStep)};
  static constexpr Division kDivision = Division::kRanges;
};

// Pass 2: p = p - step_size * u, u from LambMoments.
template <class T>
struct LambUpdateOperands {
  T u{}, p{}, steps{};
};
struct LambUpdate {
  template <class T>
  using Operands = LambUpdateOperands<T>;
  using Args = NoArgs;
  static constexpr LambUpdateOperands<OperandSpec> kOperands = {
      .u = reads("u", Touched::kList),
      .p = updates("p", Touched::kList),
      .steps = reads("steps", Touched::kTensors, Element::kTensorStep)};
  static constexpr Division kDivision = Division::kQuads;
  static constexpr PieceIndex kAlignment = &Piece::offset;
};

}  // namespace kernels

SOTTO_HOST_DEVICE inline float lamb_direction(const LambGroupScalars& s, float m, float v,
                                              float p) {
  const float den = s.eps_inside_sqrt != 0 ? std::sqrt(v + s.eps) : std::sqrt(v) + s.eps;
  return with_decay(s, m / den, p);
}

}  // namespace sotto
