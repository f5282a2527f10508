// SGD, with or without momentum.
#pragma once

#include "core/kernels/adam.h"

namespace sotto {

struct SgdGroupScalars : GroupScalars {
  float momentum = 0;
  float one_minus_dampening = 1;  // 1 in the first step
};

struct SgdArgs {
  bool nesterov;
  Dtype source = Dtype::kF32;
};

namespace kernels {

// g' = g * clip, 0 where masked; g' = g' + wd*p (wd != 0). With momentum:
// m = momentum*m + (1-dampening)*g', direction m, or g' + momentum*m with Nesterov's momentum; else
// direction g'. p = p - float(lr)*direction.
// g: source. m: flat, absent without momentum. p: list.
template <class T>
struct SgdOperands {
  T g{}, m{}, p{}, scalars{}, clip{}, valid{};
};
struct Sgd {
  template <class T>
  using Operands = SgdOperands<T>;
  using Args = SgdArgs;
  static constexpr SgdOperands<OperandSpec> kOperands = {
      .g = source<SgdArgs>("g"),
      .m = optional(updates("m", Touched::kFlat)),
      .p = updates("p", Touched::kList),
      .scalars = group_scalars<SgdGroupScalars>(),
      .clip = clip_factor(),
      .valid = valid_bits()};
  static constexpr Division kDivision = Division::kQuads;
};

// Sgd with m of another type, as in AdamLowPrecision; m is not optional.
template <class T>
struct SgdLowPrecisionOperands {
  SgdOperands<T> sgd{};
  T step{}, m_exponents{};
};
struct SgdLowPrecision {
  template <class T>
  using Operands = SgdLowPrecisionOperands<T>;
  using Args = LowPrecisionArgs;
  static constexpr SgdLowPrecisionOperands<OperandSpec> kOperands = {
      .sgd = {.g = source<LowPrecisionArgs>("g"),
              .m = low_precision_state("m"),
              .p = updates("p", Touched::kList),
              .scalars = group_scalars<SgdGroupScalars>(),
              .clip = clip_factor(),
              .valid = valid_bits()},
      .step = reads("step", Touched::kOne, Element::kU64),
      .m_exponents = exponents("m_exponents")};
  static constexpr Division kDivision = Division::kNorms;
};

}  // namespace kernels

// m is left alone without momentum.
SOTTO_HOST_DEVICE inline void sgd_element(const SgdGroupScalars& s, float lr, bool momentum,
                                          bool nesterov, float g, float* m, float* p) {
  const float gradient = with_decay(s, g, *p);
  float direction = gradient;
  if (momentum) {
    *m = s.momentum * *m + s.one_minus_dampening * gradient;
    direction = nesterov ? gradient + s.momentum * *m : *m;
  }
  *p = *p - lr * direction;
}

// The element of a first-moment optimizer, for the loops of all devices: its kernels, what they
// read of a group, and what it does with a gradient that has been clipped and masked. momentum:
// there is an m.
struct SgdElement {
  using Plain = kernels::Sgd;
  using LowPrecision = kernels::SgdLowPrecision;
  using Scalars = SgdGroupScalars;
  SOTTO_HOST_DEVICE explicit SgdElement(const SgdArgs& a) : nesterov(a.nesterov) {}
  SOTTO_HOST_DEVICE explicit SgdElement(const LowPrecisionArgs& a) : nesterov(a.nesterov) {}
  SOTTO_HOST_DEVICE void step(const Scalars& s, float lr, bool momentum, float g, float* m,
                              float* p) const {
    sgd_element(s, lr, momentum, nesterov, g, m, p);
  }
  bool nesterov;
};

}  // namespace sotto
