// Ops of conversions between float types and of sums of micro-batches.
#pragma once

#include "core/base/dtype.h"
#include "core/cpu/elements.h"
#include "core/cpu/ops.h"

namespace sotto {

struct ConvertOp : OpBase {
  explicit ConvertOp(const KernelCall& call)
      : args(call.arguments<ConvertArgs>()),
        from{&call.operands[0], args.from},
        to(&call.operands[1]) {}

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
      : first_one(call.arguments<AccumulateArgs>().first),
        from{&call.operands[0], call.arguments<AccumulateArgs>().source},
        sums(&call.operands[1]) {
    if (const double* by = call.operands[2].flat<const double>(); by != nullptr)
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
