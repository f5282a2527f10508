// Adam, LAMB, SGD and norms of gradients.
#pragma once

#include "cuda/kernels/quads.cuh"
#include "cuda/kernels/rules.cuh"

namespace sotto::cuda {

struct SumSquaresKernel : QuadOp {
  static constexpr uint32_t kSums = 1;
  static constexpr bool kPlain = true;
  using Place = Floats;
  using Values = Quad<float>;
  __device__ explicit SumSquaresKernel(const Params& p)
      : SumSquaresKernel(p, p.of<kernels::SumSquares>()) {}
  __device__ SumSquaresKernel(const Params& p, const kernels::SumSquaresOperands<Operand>& o)
      : input{&o.x, p.arguments<SourceArgs>().source}, sums_out(o.sums.flat<float>()) {}

  __device__ float* sums(uint32_t) const { return sums_out; }
  __device__ Place place(const Piece& piece, uint64_t j) const { return input.of(piece).from(j); }
  __device__ static bool plain(const Place& at) { return plain_floats(at); }
  template <class N, uint32_t kRounds>
  __device__ void load(const Place& at, uint32_t i, N n, Values (&values)[kRounds]) const {
#pragma unroll
    for (uint32_t q = 0; q < kRounds; ++q) values[q] = load_floats(at, i + q * kRound, n);
  }
  template <class N>
  __device__ uint32_t step(const Place&, uint32_t, N n, Values x, float* terms) const {
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) x.v[k] = x.v[k] * x.v[k];
    store_quad(terms, n, x);
    return 0;
  }

  Source input;
  float* sums_out;
};

struct AdamKernel : QuadOp {
  __device__ explicit AdamKernel(const Params& p) : AdamKernel(p, p.of<kernels::Adam>()) {}
  __device__ AdamKernel(const Params& p, const kernels::AdamOperands<Operand>& o)
      : rule(o, p.arguments<SourceArgs>().source), m(o.m.flat<float>()), v(o.v.flat<float>()) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    const uint64_t flat = piece.flat + j;
    Quad<float> m4 = load_quad(m + flat, n);
    Quad<float> v4 = load_quad(v + flat, n);
    rule.step(piece, j, n, &m4, &v4);
    store_quad(m + flat, n, m4);
    store_quad(v + flat, n, v4);
    return 0;
  }

  AdamRule rule;
  float* m;
  float* v;
};

struct LambMomentsKernel : QuadOp {
  static constexpr uint32_t kSums = 2;
  __device__ explicit LambMomentsKernel(const Params& p)
      : LambMomentsKernel(p, p.of<kernels::LambMoments>()) {}
  __device__ LambMomentsKernel(const Params& p, const kernels::LambMomentsOperands<Operand>& o)
      : gradients{{&o.g, p.arguments<SourceArgs>().source},
                  o.clip.flat<const float>(),
                  o.valid.flat<const uint8_t>()},
        m(o.m.flat<float>()),
        v(o.v.flat<float>()),
        parameters(&o.p),
        groups(o.scalars.flat<const LambGroupScalars>()),
        directions(&o.u),
        p_sums(o.p_sums.flat<float>()),
        u_sums(o.u_sums.flat<float>()) {}

  __device__ float* sums(uint32_t s) const { return s == 0 ? p_sums : u_sums; }
  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float* terms) const {
    const LambGroupScalars& s = groups[piece.group];
    const uint64_t flat = piece.flat + j;
    const Quad<float> g = gradients.load(piece, j, n);
    const Quad<float> p4 = load_quad(tensor_of<const float>(*parameters, piece) + j, n);
    Quad<float> m4 = load_quad(m + flat, n);
    Quad<float> v4 = load_quad(v + flat, n);
    Quad<float> u4, p_terms, u_terms;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      const Moments next = adam_moments(s, m4.v[k], v4.v[k], g.v[k]);
      m4.v[k] = next.m;
      v4.v[k] = next.v;
      u4.v[k] = lamb_direction(s, next.m, next.v, p4.v[k]);
      p_terms.v[k] = p4.v[k] * p4.v[k];
      u_terms.v[k] = u4.v[k] * u4.v[k];
    }
    store_quad(m + flat, n, m4);
    store_quad(v + flat, n, v4);
    store_quad(tensor_of<float>(*directions, piece) + j, n, u4);
    store_quad(terms, n, p_terms);
    store_quad(terms + kStaged, n, u_terms);
    return 0;
  }

  Gradients gradients;
  float* m;
  float* v;
  const Operand* parameters;
  const LambGroupScalars* groups;
  const Operand* directions;  // may be the memory of float32 gradients
  float* p_sums;
  float* u_sums;
};

struct LambUpdateKernel : QuadOp {
  __device__ explicit LambUpdateKernel(const Params& p)
      : LambUpdateKernel(p, p.of<kernels::LambUpdate>()) {}
  __device__ LambUpdateKernel(const Params&, const kernels::LambUpdateOperands<Operand>& o)
      : directions(&o.u), parameters(&o.p), steps(o.steps.flat<const TensorStep>()) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    const float step = steps[piece.tensor].step_size;
    float* at = tensor_of<float>(*parameters, piece) + j;
    const Quad<float> u = load_quad(tensor_of<const float>(*directions, piece) + j, n);
    Quad<float> p4 = load_quad(at, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) p4.v[k] = p4.v[k] - step * u.v[k];
    store_quad(at, n, p4);
    return 0;
  }

  const Operand* directions;
  const Operand* parameters;
  const TensorStep* steps;
};

}  // namespace sotto::cuda
