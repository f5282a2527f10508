// Op of SGD with momentum.
#pragma once

#include "core/cpu/elements.h"
#include "core/cpu/ops.h"
#include "core/cpu/ops_adam.h"
#include "core/kernels/sgd.h"

namespace sotto {

template <class State>
struct SgdOp : OpBase {
  using Kernel = std::conditional_t<State::kNarrow, kernels::SgdNarrow, kernels::Sgd>;

  explicit SgdOp(const KernelCall& call) : SgdOp(call, shared(call)) {}
  SgdOp(const KernelCall& call, const kernels::SgdOperands<Operand>& o)
      : nesterov(is_nesterov(call)),
        gradients{{&o.g, source_of<State, SgdArgs>(call)},
                  o.clip.flat<const float>(),
                  o.valid.flat<const uint8_t>()},
        state(operands(call)),
        parameters(&o.p),
        groups(o.scalars.flat<const GroupScalars>()) {}

  Floats source(const Piece& p) const { return gradients.source.of(p); }
  float* parameter(const Piece& p) const { return parameters->list<float>(p.tensor) + p.offset; }
  void open(uint64_t block) { state.open(block); }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const GroupScalars& s = groups[piece.group];
    const float lr = static_cast<float>(s.lr);
    const Floats g = source(piece);
    float* p = parameter(piece);
    for (const uint64_t end = first + count; first != end;) {
      const uint64_t stop = first + state.begin(piece, first, end - first);
      for (; first != stop; ++first) {
        const uint64_t flat = piece.flat + first;
        const float gradient = gradients.at(g, first, flat);
        Moments moments{state.present() ? state.old_m(flat) : 0.0f, 0.0f};
        sgd_element(s, lr, state.present(), nesterov, gradient, &moments.m, &p[first]);
        if (state.present()) state.keep(moments, flat, position_in_block(piece, first));
      }
    }
  }
  void finish() { state.finish(); }

  bool nesterov;
  Gradients gradients;
  State state;
  const Operand* parameters;
  const GroupScalars* groups;

 private:
  static bool is_nesterov(const KernelCall& call) {
    if constexpr (State::kNarrow) return call.arguments<NarrowArgs>().nesterov;
    return call.arguments<SgdArgs>().nesterov;
  }
  static const kernels::SgdOperands<Operand>& shared(const KernelCall& call) {
    if constexpr (State::kNarrow) {
      return call.of<Kernel>().sgd;
    } else {
      return call.of<Kernel>();
    }
  }
  static StateOperands operands(const KernelCall& call) {
    StateOperands at{shared(call).m.data};
    if constexpr (State::kNarrow) {
      at.step = call.of<Kernel>().step.template flat<const uint64_t>();
      at.m_exponents = call.of<Kernel>().m_exponents.template flat<uint8_t>();
    }
    return at;
  }
};

}  // namespace sotto
