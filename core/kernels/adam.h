// Adam (arXiv 1412.6980) and AdamW (arXiv 1711.05101), specification section 3.
#pragma once

#include "core/base/low_precision_state.h"
#include "core/kernels/elements.h"
#include "core/kernels/norms.h"

namespace sotto {

struct AdamGroupScalars : GroupScalars {
  float c1 = 1, c2 = 1;    // bias corrections 1 - b1^t, 1 - b2^t (1 without)
  uint32_t decoupled = 1;  // weight decay 1 = in the update (AdamW), 0 = in the gradient (L2)
};

struct LowPrecisionArgs {
  Dtype source = Dtype::kF32;
  StateType state = StateType::kBf16;  // or kFp8
  bool nesterov = false;               // SGD
};

namespace kernels {

inline uint32_t state_bits(const void* args) {
  return static_cast<const LowPrecisionArgs*>(args)->state == StateType::kBf16 ? 16 : 8;
}
constexpr OperandSpec low_precision_state(const char* name) {
  return sized(updates(name, Touched::kFlat), state_bits);
}
// Of 8-bit floats.
constexpr OperandSpec exponents(const char* name) {
  return optional(updates(name, Touched::kBlocks, Element::kStateExponents));
}

// g' = g * clip, 0 where masked; decoupled = 0: g' = g' + wd*p (if wd != 0);
//   m = b1*m + (1-b1)*g';  v = b2*v + ((1-b2)*g')*g';
//   u = (m*fl(1/c1)) / (sqrt(v*fl(1/c2)) + eps);  decoupled: u = u + wd*p (if wd != 0);
//   p = p - float(lr)*u.
// g: source. m, v: flat. p: list.
template <class T>
struct AdamOperands {
  T g{}, m{}, v{}, p{}, scalars{}, clip{}, valid{};
};
struct Adam {
  template <class T>
  using Operands = AdamOperands<T>;
  using Args = SourceArgs;
  static constexpr AdamOperands<OperandSpec> kOperands = {
      .g = source<SourceArgs>("g"),
      .m = updates("m", Touched::kFlat),
      .v = updates("v", Touched::kFlat),
      .p = updates("p", Touched::kList),
      .scalars = group_scalars<AdamGroupScalars>(),
      .clip = clip_factor(),
      .valid = valid_bits()};
  static constexpr Division kDivision = Division::kQuads;
};

// Adam with m and v of another type (base/low_precision_state.h): uint16 (bf16) or uint8 (fp8).
// Their old values are widened; p moves by the new ones as float32, which are then rounded with
// rounding_bits of the state step (uint64), Piece::block and the position in that norm block.
// Blocks and positions are those of tensors: pieces are in a tensor's own order, and a call has all
// of a norm block's elements one after the other. fp8: a norm block has kStateBlocksPerNormBlock
// exponent bytes of m and as many of v.
template <class T>
struct AdamLowPrecisionOperands {
  AdamOperands<T> adam{};
  T step{}, m_exponents{}, v_exponents{};
};
struct AdamLowPrecision {
  template <class T>
  using Operands = AdamLowPrecisionOperands<T>;
  using Args = LowPrecisionArgs;
  static constexpr AdamLowPrecisionOperands<OperandSpec> kOperands = {
      .adam = {.g = source<LowPrecisionArgs>("g"),
               .m = low_precision_state("m"),
               .v = low_precision_state("v"),
               .p = updates("p", Touched::kList),
               .scalars = group_scalars<AdamGroupScalars>(),
               .clip = clip_factor(),
               .valid = valid_bits()},
      .step = reads("step", Touched::kOne, Element::kU64),
      .m_exponents = exponents("m_exponents"),
      .v_exponents = exponents("v_exponents")};
  static constexpr Division kDivision = Division::kNorms;
};

}  // namespace kernels

SOTTO_HOST_DEVICE inline float adam_parameter(const AdamGroupScalars& s, float m, float v, float p,
                                              float lr) {
  float u = (m * (1.0f / s.c1)) / (std::sqrt(v * (1.0f / s.c2)) + s.eps);
  if (s.decoupled != 0) u = with_decay(s, u, p);
  return p - lr * u;
}

// g: after clipping and mask.
SOTTO_HOST_DEVICE inline void adam_element(const AdamGroupScalars& s, float lr, float g,
                                           Moments* moments, float* p) {
  if (s.decoupled == 0) g = with_decay(s, g, *p);
  *moments = adam_moments(s, moments->m, moments->v, g);
  *p = adam_parameter(s, moments->m, moments->v, *p, lr);
}

}  // namespace sotto
