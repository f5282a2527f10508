// Op of optimizers that keep a first moment at most. Element: SgdElement in core/kernels/sgd.h
// shows what it has.
#pragma once

#include "core/cpu/elements.h"
#include "core/cpu/ops.h"
#include "core/cpu/ops_adam.h"
#include "core/kernels/sgd.h"

namespace sotto {

template <class State, class Element>
struct FirstMomentOp : OpBase {
  using Kernel = std::conditional_t<State::kLowPrecision, typename Element::LowPrecision,
                                    typename Element::Plain>;
  using Scalars = typename Element::Scalars;

  explicit FirstMomentOp(const KernelCall& call) : FirstMomentOp(call, shared(call)) {}
  FirstMomentOp(const KernelCall& call, const kernels::SgdOperands<Operand>& o)
      : element(call.arguments<typename Kernel::Args>()),
        gradients{{&o.g, call.arguments<typename Kernel::Args>().source},
                  o.clip.flat<const float>(),
                  o.valid.flat<const uint8_t>()},
        state(operands(call)),
        parameters(&o.p),
        groups(o.scalars.template flat<const Scalars>()) {}

  Floats source(const Piece& p) const { return gradients.source.of(p); }
  float* parameter(const Piece& p) const { return parameters->list<float>(p.tensor) + p.offset; }
  void open(uint64_t block) { state.open(block); }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const Scalars& s = groups[piece.group];
    const float lr = static_cast<float>(s.lr);
    const Floats g = source(piece);
    float* p = parameter(piece);
    for (const uint64_t end = first + count; first != end;) {
      const uint64_t stop = first + state.begin(piece, first, end - first);
      for (; first != stop; ++first) {
        const uint64_t flat = piece.flat + first;
        const float gradient = gradients.at(g, first, flat);
        Moments moments{state.present() ? state.old_m(flat) : 0.0f, 0.0f};
        element.step(s, lr, state.present(), gradient, &moments.m, &p[first]);
        if (state.present()) state.keep(moments, flat, position_in_block(piece, first));
      }
    }
  }
  void finish() { state.finish(); }

  Element element;
  Gradients gradients;
  State state;
  const Operand* parameters;
  const Scalars* groups;

 private:
  static const kernels::SgdOperands<Operand>& shared(const KernelCall& call) {
    if constexpr (State::kLowPrecision) {
      return call.of<Kernel>().sgd;
    } else {
      return call.of<Kernel>();
    }
  }
  static StateOperands operands(const KernelCall& call) {
    StateOperands at{shared(call).m.data};
    if constexpr (State::kLowPrecision) {
      at.step = call.of<Kernel>().step.template flat<const uint64_t>();
      at.m_exponents = call.of<Kernel>().m_exponents.template flat<uint8_t>();
    }
    return at;
  }
};

// The reference kernels of an element.
template <class Element>
void run_first_moment(const KernelCall& call) {
  run_elements<FirstMomentOp<FloatState, Element>>(call);
}
template <class Element>
void run_low_precision_first_moment(const KernelCall& call) {
  if (call.arguments<LowPrecisionArgs>().state == StateType::kBf16)
    return run_elements<FirstMomentOp<Bf16State, Element>>(call);
  run_elements<FirstMomentOp<Fp8State<ScalarFp8>, Element>>(call);
}

}  // namespace sotto
