// Ops of conversions between float types and of sums of micro-batches.
#pragma once

#include "core/base/dtype.h"
#include "core/cpu/elements.h"
#include "core/cpu/ops.h"
#include "core/kernels/bytes.h"

namespace sotto {

struct ConvertOp : OpBase {
  explicit ConvertOp(const KernelCall& call) : ConvertOp(call, call.of<kernels::Convert>()) {}
  ConvertOp(const KernelCall& call, const kernels::ConvertOperands<Operand>& o)
      : args(call.arguments<ConvertArgs>()), from{&o.x, args.from}, to(&o.y) {}

  // First element of the piece.
  uint8_t* target(const Piece& p) const {
    return to->list<uint8_t>(p.tensor) + p.offset * dtype_bytes(args.to);
  }
  void elements(const Piece& p, uint64_t first, uint64_t count) {
    const Floats x = from.of(p);
    uint8_t* y = target(p);
    for (uint64_t j = first; j < first + count; ++j) {
      const float wide = x[j] * args.factor;
      if (args.to == Dtype::kF32) {
        reinterpret_cast<float*>(y)[j] = wide;
      } else {
        reinterpret_cast<uint16_t*>(y)[j] = narrow(args.to, wide);
      }
    }
  }

  const ConvertArgs& args;
  Source from;
  const Operand* to;
};

struct AccumulateOp : OpBase {
  explicit AccumulateOp(const KernelCall& call)
      : AccumulateOp(call, call.of<kernels::Accumulate>()) {}
  AccumulateOp(const KernelCall& call, const kernels::AccumulateOperands<Operand>& o)
      : first_one(call.arguments<AccumulateArgs>().first),
        from{&o.x, call.arguments<AccumulateArgs>().source},
        sums(&o.sum) {
    if (const double* by = o.factor.flat<const double>(); by != nullptr)
      factor = static_cast<float>(*by);
  }

  Floats source(const Piece& p) const { return from.of(p); }
  float* sum(const Piece& p) const { return sums->list<float>(p.tensor) + p.offset; }
  void elements(const Piece& p, uint64_t first, uint64_t count) {
    const Floats x = source(p);
    float* s = sum(p);
    for (uint64_t j = first; j < first + count; ++j)
      s[j] = (first_one ? x[j] : s[j] + x[j]) * factor;
  }

  const bool first_one;
  Source from;
  const Operand* sums;
  float factor = 1.0f;
};

}  // namespace sotto
