// Op of SGD with momentum.
#pragma once

#include "core/cpu/elements.h"
#include "core/cpu/ops.h"
#include "core/cpu/ops_adam.h"

namespace sotto {

struct SgdOp : OpBase {
  explicit SgdOp(const KernelCall& call)
      : args(call.arguments<SgdArgs>()),
        gradients{{&call.operands[0], args.source},
                  call.operands[4].flat<const float>(),
                  call.operands[5].flat<const uint8_t>()},
        m(call.operands[1].flat<float>()),
        parameters(&call.operands[2]),
        groups(call.operands[3].flat<const GroupScalars>()) {}

  Floats source(const Piece& p) const { return gradients.source.of(p); }
  float* parameter(const Piece& p) const { return parameters->list<float>(p.tensor) + p.offset; }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const GroupScalars& s = groups[piece.group];
    const float lr = static_cast<float>(s.lr);
    const Floats g = source(piece);
    float* p = parameter(piece);
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = piece.flat + j;
      sgd_element(s, lr, m != nullptr, args.nesterov, gradients.at(g, j, flat),
                  m != nullptr ? m + flat : nullptr, &p[j]);
    }
  }

  const SgdArgs& args;
  Gradients gradients;
  float* m;
  const Operand* parameters;
  const GroupScalars* groups;
};

}  // namespace sotto
