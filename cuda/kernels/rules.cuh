// Gradients as steps see them, and what a step of Adam does to elements, wherever its state is
// kept.
#pragma once

#include "cuda/kernels/quads.cuh"

namespace sotto::cuda {

// A gradient as optimizers see it: clipped, 0 where masked.
struct Gradients {
  Source source;
  const float* clip;
  const uint8_t* valid;

  __device__ Quad<float> load(const Piece& piece, uint64_t j, uint32_t n) const {
    Quad<float> g = load_floats(source.of(piece), j, n);
    const QuadBits taken = load_mask(valid, piece.flat + j, n);
    const float by = clip != nullptr ? *clip : 1.0f;  // a product with 1 is exact
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) g.v[k] = taken[k] ? g.v[k] * by : 0.0f;
    return g;
  }
};

// What a step of Adam does to elements whose moments have been loaded.
struct AdamRule {
  static constexpr bool kVariance = true;
  using Operands = kernels::AdamOperands<Operand>;
  __device__ AdamRule(const Operands& o, Dtype source)
      : gradients{{&o.g, source}, o.clip.flat<const float>(), o.valid.flat<const uint8_t>()},
        parameters(&o.p),
        groups(o.scalars.flat<const AdamGroupScalars>()) {}

  __device__ void step(const Piece& piece, uint64_t j, uint32_t n, Quad<float>* m,
                       Quad<float>* v) const {
    const AdamGroupScalars& s = groups[piece.group];
    const float lr = static_cast<float>(s.lr);
    float* at = tensor_of<float>(*parameters, piece) + j;
    const Quad<float> g = gradients.load(piece, j, n);
    Quad<float> p4 = load_quad(at, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      Moments moments{m->v[k], v->v[k]};
      adam_element(s, lr, g.v[k], &moments, &p4.v[k]);
      m->v[k] = moments.m;
      v->v[k] = moments.v;
    }
    store_quad(at, n, p4);
  }

  Gradients gradients;
  const Operand* parameters;
  const AdamGroupScalars* groups;
};

}  // namespace sotto::cuda
