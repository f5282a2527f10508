// 1-bit LAMB (arXiv 2104.06069), specification section 7. 1-bit Adam has the same encoder, with
// scaling coefficients of 1.
#pragma once

#include "core/kernels/momentum.h"
#include "core/kernels/onebit.h"

namespace sotto {

struct OnebitLambGroupScalars : GroupScalars {
  double factor_max = 0;
  double factor_min = 0;
  double factor_threshold = 0;
};

struct ScalingArgs {
  const NormRange* ranges;  // one per tensor
  uint64_t n;
  double debias;  // 0: off
};

namespace kernels {

// Encoder: x = ((b1*m + (1-b1)*g') * s), g' = g * clip (clip absent: g), s = float(scaling_coeff);
// then as OnebitEncode. Masked elements have m = 0.
// identity = 1 (one rank): nothing is encoded; c receives x / s (0 where masked; a result that is
// not finite raises the flag and is stored as 0); old_scales, bits and sums are absent.
// g: source. m: the old momentum.
template <class T>
struct OnebitLambEncodeOperands {
  T g{};
  MomentumOperands<T> m{};
  EncoderOperands<T> to{};
  T scalars{}, states{}, clip{};
};
// As OnebitEncodeUndo, with x as in OnebitLambEncode.
struct OnebitLambEncodeUndo {
  template <class T>
  using Operands = OnebitLambEncodeOperands<T>;
  using Args = EncodeArgs;
  static constexpr OnebitLambEncodeOperands<OperandSpec> kOperands = {
      .g = source<EncodeArgs>("g"),
      .m = kMomentum,
      .to = kEncoderUndo,
      .scalars = group_scalars(),
      .states = reads("states", Touched::kTensors, Element::kTensorState),
      .clip = clip_factor()};
  static constexpr Division kDivision = Division::kQuads;
};
struct OnebitLambEncode {
  template <class T>
  using Operands = OnebitLambEncodeOperands<T>;
  using Args = EncodeArgs;
  using Undo = OnebitLambEncodeUndo;
  static constexpr OnebitLambEncodeOperands<OperandSpec> kOperands = {
      .g = source<EncodeArgs>("g"),
      .m = kMomentum,
      .to = kEncoder,
      .scalars = group_scalars(),
      .states = reads("states", Touched::kTensors, Element::kTensorState),
      .clip = clip_factor()};
  static constexpr Division kDivision = Division::kNorms;
};

// s_l = ||m_l|| / sqrt(count_l); united = mean of s_l over tensors with count and s_l not 0;
// scaling_coeff = united / s_l, 1 for the others; last_factor = 1. debias > 0: c_avg = c_avg /
// debias.
// sums: block sums of m*m. counts: uint64 per tensor.
template <class T>
struct OnebitLambScalingOperands {
  T sums{}, counts{}, states{};
};
struct OnebitLambScaling {
  template <class T>
  using Operands = OnebitLambScalingOperands<T>;
  using Args = ScalingArgs;
  static constexpr OnebitLambScalingOperands<OperandSpec> kOperands = {
      .sums = reads("sums", Touched::kRangeBlocks),
      .counts = reads("counts", Touched::kRanges, Element::kU64),
      .states = updates("states", Touched::kTensors, Element::kTensorState)};
  static constexpr Division kDivision = Division::kNever;
};

// Pass A of the compressed step (section 7.4). m = new momentum, o = old momentum:
//   gr = (m - b1*o) / (1-b1);  vf = b2*vf + ((1-b2)*gr)*gr;  u0 = m/den;  u = u0 + wd*p (wd != 0);
//   block sums of u0*u0 and u*u (0 in groups with wd = 0); block maximum of den / (sqrt(vf) + eps).
// Masked: vf as it is, no part in the maximum (an all-masked block has maximum 0), u0 = 0, u =
// wd*p.
template <class T>
struct OnebitLambFactorOperands {
  MomentumOperands<T> m{}, old{};
  T vf{}, den{}, p{}, valid{}, u0_sums{}, u_sums{}, maxima{}, scalars{}, states{};
};
struct OnebitLambFactor {
  template <class T>
  using Operands = OnebitLambFactorOperands<T>;
  using Args = NoArgs;
  static constexpr OnebitLambFactorOperands<OperandSpec> kOperands = {
      .m = kMomentum,
      .old = kMomentum,
      .vf = updates("vf", Touched::kFlat),
      .den = reads("den", Touched::kFlat),
      .p = reads("p", Touched::kList),
      .valid = valid_bits(),
      .u0_sums = writes("u0_sums", Touched::kBlocks),
      .u_sums = writes("u_sums", Touched::kBlocks),
      .maxima = writes("maxima", Touched::kBlocks),
      .scalars = group_scalars(),
      .states = reads("states", Touched::kTensors, Element::kTensorState)};
  static constexpr Division kDivision = Division::kNorms;
};

// Per tensor: factor = max of block maxima; wd != 0: q = min(1, ||u0|| / ||u||) (1 if ||u|| = 0),
// factor = factor*q + (1-q); then min factor_max, max factor_min, min last*(1+threshold), max
// last*(1-threshold); last_factor = factor; step_size = float(lr * (c_avg * factor)).
// A tensor without valid elements (maximum 0) keeps its factor at last_factor.
template <class T>
struct OnebitLambScalarsOperands {
  T u0_sums{}, u_sums{}, maxima{}, scalars{}, states{}, steps{};
};
struct OnebitLambScalars {
  template <class T>
  using Operands = OnebitLambScalarsOperands<T>;
  using Args = TensorArgs;
  static constexpr OnebitLambScalarsOperands<OperandSpec> kOperands = {
      .u0_sums = reads("u0_sums", Touched::kRangeBlocks),
      .u_sums = reads("u_sums", Touched::kRangeBlocks),
      .maxima = reads("maxima", Touched::kRangeBlocks),
      .scalars = group_scalars<OnebitLambGroupScalars>(),
      .states = updates("states", Touched::kTensors, Element::kTensorState),
      .steps = writes("steps", Touched::kTensors, Element::kTensorStep)};
  static constexpr Division kDivision = Division::kRanges;
};

}  // namespace kernels

// Input of the encoder of 1-bit LAMB. scaling: float(scaling_coeff).
SOTTO_HOST_DEVICE inline float onebit_lamb_input(const GroupScalars& s, float m, float g,
                                                 float scaling) {
  return (s.b1 * m + s.one_minus_b1 * g) * scaling;
}

// (1-b2)*gr*gr, gr the gradient that momentum `m` after `old` implies.
SOTTO_HOST_DEVICE inline float fresh_square(const GroupScalars& s, float m, float old) {
  const float g = (m - s.b1 * old) / s.one_minus_b1;
  return (s.one_minus_b2 * g) * g;
}

SOTTO_HOST_DEVICE inline float fresh_variance(const GroupScalars& s, float m, float old, float vf) {
  return s.b2 * vf + fresh_square(s, m, old);
}

}  // namespace sotto
