// Lion (arXiv 2302.06675, algorithm 2).
#pragma once

#include "core/kernels/sgd.h"

namespace sotto {

struct LionGroupScalars : GroupScalars {
  float decay = 1;  // 1 - lr * wd
};

namespace kernels {

// g' = g * clip, 0 where masked; c = b1*m + (1-b1)*g'; step = float(lr) if c > 0, -float(lr) if
// c < 0, else 0; p = decay*p - step; m = b2*m + (1-b2)*g'. decay is float(1 - lr*wd).
// g: source. m: flat. p: list.
struct Lion {
  template <class T>
  using Operands = SgdOperands<T>;
  using Args = SourceArgs;
  static constexpr SgdOperands<OperandSpec> kOperands = {
      .g = source<SourceArgs>("g"),
      .m = updates("m", Touched::kFlat),
      .p = updates("p", Touched::kList),
      .scalars = group_scalars<LionGroupScalars>(),
      .clip = clip_factor(),
      .valid = valid_bits()};
  static constexpr Division kDivision = Division::kQuads;
};

// Lion with m of another type, as in AdamLowPrecision; c is made of the old m.
struct LionLowPrecision {
  template <class T>
  using Operands = SgdLowPrecisionOperands<T>;
  using Args = LowPrecisionArgs;
  static constexpr SgdLowPrecisionOperands<OperandSpec> kOperands = [] {
    SgdLowPrecisionOperands<OperandSpec> operands = SgdLowPrecision::kOperands;
    operands.sgd.scalars = group_scalars<LionGroupScalars>();
    return operands;
  }();
  static constexpr Division kDivision = Division::kNorms;
};

}  // namespace kernels

struct LionElement {
  using Plain = kernels::Lion;
  using LowPrecision = kernels::LionLowPrecision;
  using Scalars = LionGroupScalars;
  SOTTO_HOST_DEVICE explicit LionElement(const SourceArgs&) {}
  SOTTO_HOST_DEVICE explicit LionElement(const LowPrecisionArgs&) {}
  SOTTO_HOST_DEVICE void step(const Scalars& s, float lr, bool /*momentum*/, float g, float* m,
                              float* p) const {
    const float c = s.b1 * *m + s.one_minus_b1 * g;
    const float change = c > 0.0f ? lr : (c < 0.0f ? -lr : 0.0f);
    *p = s.decay * *p - change;
    *m = s.b2 * *m + s.one_minus_b2 * g;
  }
};

}  // namespace sotto
