// Optimizers that keep a first moment at most, with it in float32 or in fewer bits. Element:
// SgdElement in core/kernels/sgd.h shows what it has.
#pragma once

#include "core/kernels/sgd.h"
#include "cuda/kernels/low_precision.cuh"

namespace sotto::cuda {

// What a step does to elements whose moment, if there is one, has been loaded.
template <class Element>
struct FirstMomentRule {
  static constexpr bool kVariance = false;
  using Scalars = typename Element::Scalars;
  template <class Args>
  __device__ FirstMomentRule(const kernels::SgdOperands<Operand>& o, const Args& args,
                             bool with_momentum)
      : element(args),
        gradients{{&o.g, args.source}, o.clip.flat<const float>(), o.valid.flat<const uint8_t>()},
        momentum(with_momentum),
        parameters(&o.p),
        groups(o.scalars.flat<const Scalars>()) {}

  __device__ void step(const Piece& piece, uint64_t j, uint32_t n, Quad<float>* m,
                       Quad<float>*) const {
    const Scalars& s = groups[piece.group];
    const float lr = static_cast<float>(s.lr);
    float* at = tensor_of<float>(*parameters, piece) + j;
    const Quad<float> g = gradients.load(piece, j, n);
    Quad<float> p4 = load_quad(at, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) element.step(s, lr, momentum, g.v[k], &m->v[k], &p4.v[k]);
    store_quad(at, n, p4);
  }

  Element element;
  Gradients gradients;
  bool momentum;
  const Operand* parameters;
  const Scalars* groups;
};

template <class Element>
struct FirstMomentKernel : QuadOp {
  using Kernel = typename Element::Plain;
  __device__ explicit FirstMomentKernel(const Params& p)
      : m(p.of<Kernel>().m.template flat<float>()),
        rule(p.of<Kernel>(), p.arguments<typename Kernel::Args>(), m != nullptr) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    Quad<float> m4{};
    if (m != nullptr) m4 = load_quad(m + piece.flat + j, n);
    rule.step(piece, j, n, &m4, nullptr);
    if (m != nullptr) store_quad(m + piece.flat + j, n, m4);
    return 0;
  }

  float* m;
  FirstMomentRule<Element> rule;
};

// For low_precision_step.
template <class Element>
struct LowPrecisionFirstMoment : FirstMomentRule<Element> {
  using Kernel = typename Element::LowPrecision;
  __device__ explicit LowPrecisionFirstMoment(const Params& p)
      : FirstMomentRule<Element>(p.of<Kernel>().sgd, p.arguments<LowPrecisionArgs>(), true) {}
  __device__ static const Operand& step_of(const Params& p) { return p.of<Kernel>().step; }
  __device__ static const Operand& moment(const Params& p, uint32_t) {
    return p.of<Kernel>().sgd.m;
  }
  __device__ static const Operand& exponents(const Params& p, uint32_t) {
    return p.of<Kernel>().m_exponents;
  }
};

}  // namespace sotto::cuda
