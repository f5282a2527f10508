// The compressed stage that 1-bit Adam (arXiv 2102.02888) and 1-bit LAMB (arXiv 2104.06069) share,
// and its beginning, which 0/1 Adam has too: the variance is frozen, and parameters follow the
// momentum, which is floats, or bits and scales.
#pragma once

#include "core/kernels/lamb.h"

namespace sotto {

struct FreezeArgs {
  bool mask_zero_variance;
};

namespace kernels {

// Momentum as floats (flat), or as bits (flat, base 0) and scale messages:
//   m = bit ? M : -M,  M = R / float(scaling_coeff),  R number `message` of the messages.
// Masked elements have m = 0. Without scaling_coeff (0/1 Adam): M = R.
template <class T>
struct MomentumOperands {
  T floats{}, bits{}, messages{};
};
inline constexpr MomentumOperands<OperandSpec> kMomentum = {
    .floats = optional(reads("floats", Touched::kFlat)),
    .bits = optional(reads("bits", Touched::kFlat, Element::kBit)),
    .messages = optional(reads("messages", Touched::kMessages))};

// Switch to a frozen variance: vf = v; den = sqrt(v) + eps; mask_zero_variance: valid bit cleared
// where v == 0; block sums of m*m (per tensor; 0 for elements that are masked now).
// m: flat, present with sums alone.
template <class T>
struct FreezeVarianceOperands {
  T m{}, v{}, vf{}, den{}, valid{}, sums{}, scalars{};
};
struct FreezeVariance {
  template <class T>
  using Operands = FreezeVarianceOperands<T>;
  using Args = FreezeArgs;
  static constexpr FreezeVarianceOperands<OperandSpec> kOperands = {
      .m = optional(reads("m", Touched::kFlat)),
      .v = reads("v", Touched::kFlat),
      .vf = optional(writes("vf", Touched::kFlat)),
      .den = optional(writes("den", Touched::kFlat)),
      .valid = optional(updates("valid", Touched::kFlat, Element::kBit)),
      .sums = optional(writes("sums", Touched::kBlocks)),
      .scalars = group_scalars()};
  static constexpr Division kDivision = Division::kNorms;
};

// p = p - step_size * u, u0 = m/den, u = u0 + wd*p (wd != 0); u0 = 0 where masked.
template <class T>
struct MomentumUpdateOperands {
  MomentumOperands<T> m{};
  T den{}, p{}, valid{}, scalars{}, steps{}, states{};
};
struct MomentumUpdate {
  template <class T>
  using Operands = MomentumUpdateOperands<T>;
  using Args = NoArgs;
  static constexpr MomentumUpdateOperands<OperandSpec> kOperands = {
      .m = kMomentum,
      .den = reads("den", Touched::kFlat),
      .p = updates("p", Touched::kList),
      .valid = valid_bits(),
      .scalars = group_scalars(),
      .steps = reads("steps", Touched::kTensors, Element::kTensorStep),
      .states = reads("states", Touched::kTensors, Element::kTensorState)};
  static constexpr Division kDivision = Division::kQuads;
};

// m as floats from bits; 0 where masked.
template <class T>
struct MomentumFromBitsOperands {
  T bits{}, messages{}, states{}, m{}, valid{};
};
struct MomentumFromBits {
  template <class T>
  using Operands = MomentumFromBitsOperands<T>;
  using Args = NoArgs;
  static constexpr MomentumFromBitsOperands<OperandSpec> kOperands = {
      .bits = reads("bits", Touched::kFlat, Element::kBit),
      .messages = reads("messages", Touched::kMessages),
      .states = reads("states", Touched::kTensors, Element::kTensorState),
      .m = writes("m", Touched::kFlat),
      .valid = valid_bits()};
  static constexpr Division kDivision = Division::kQuads;
};

// step_size = float(lr) of every tensor; trust_ratio and factor 1.
template <class T>
struct StepSizesOperands {
  T scalars{}, steps{};
};
struct StepSizes {
  template <class T>
  using Operands = StepSizesOperands<T>;
  using Args = TensorArgs;
  static constexpr StepSizesOperands<OperandSpec> kOperands = {
      .scalars = group_scalars(),
      .steps = writes("steps", Touched::kTensors, Element::kTensorStep)};
  static constexpr Division kDivision = Division::kRanges;
};

}  // namespace kernels
}  // namespace sotto
