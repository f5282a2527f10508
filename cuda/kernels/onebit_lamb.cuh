// 1-bit LAMB: switch to the compressed stage, and both passes of the compressed step.
#pragma once

#include "cuda/kernels/quads.cuh"

namespace sotto::cuda {

// Clears the bits of a quad, bit k of `zeros` for bit i + k. Tensors start at any bit, so other
// threads may clear other bits of the same byte.
__device__ inline void clear_bits(uint8_t* bits, uint64_t i, uint32_t zeros) {
#pragma unroll
  for (uint32_t k = 0; k < kQuad; ++k) {
    if ((zeros >> k & 1) == 0) continue;
    const uintptr_t byte = reinterpret_cast<uintptr_t>(bits + ((i + k) >> 3));
    const uint32_t shift = static_cast<uint32_t>(byte % 4 * 8 + 7 - ((i + k) & 7));
    atomicAnd(reinterpret_cast<uint32_t*>(byte - byte % 4), ~(1u << shift));
  }
}

// Bits of a quad while other threads clear other bits.
__device__ inline QuadBits load_changing_bits(uint8_t* bits, uint64_t i, uint32_t n) {
  QuadBits out{0};
#pragma unroll
  for (uint32_t k = 0; k < kQuad; ++k) {
    if (k >= n) continue;
    const uintptr_t byte = reinterpret_cast<uintptr_t>(bits + ((i + k) >> 3));
    const uint32_t shift = static_cast<uint32_t>(byte % 4 * 8 + 7 - ((i + k) & 7));
    const uint32_t word = atomicOr(reinterpret_cast<uint32_t*>(byte - byte % 4), 0u);
    out.word |= (word >> shift & 1u) << (31 - k);
  }
  return out;
}

struct FreezeVarianceKernel : QuadOp {
  static constexpr uint32_t kSums = 1;
  static constexpr uint32_t kBlocksAtOnce = 6;
  __device__ explicit FreezeVarianceKernel(const Params& p)
      : FreezeVarianceKernel(p, p.of<kernels::FreezeVariance>()) {}
  __device__ FreezeVarianceKernel(const Params& p,
                                  const kernels::FreezeVarianceOperands<Operand>& o)
      : mask_zero(p.arguments<FreezeArgs>().mask_zero_variance),
        m(o.m.flat<const float>()),
        v(o.v.flat<const float>()),
        vf(o.vf.flat<float>()),
        den(o.den.flat<float>()),
        valid(o.valid.flat<uint8_t>()),
        sums_out(o.sums.flat<float>()),
        groups(o.scalars.flat<const GroupScalars>()) {}

  __device__ float* sums(uint32_t) const { return sums_out; }
  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float* terms) const {
    const GroupScalars& s = groups[piece.group];
    const uint64_t flat = piece.flat + j;
    const Quad<float> v4 = load_quad(v + flat, n);
    if (vf != nullptr) store_quad(vf + flat, n, v4);
    Quad<float> out{};
    uint32_t zeros = 0;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      out.v[k] = denominator(s, v4.v[k]);
      zeros |= static_cast<uint32_t>(k < n && v4.v[k] == 0.0f) << k;
    }
    if (den != nullptr) store_quad(den + flat, n, out);
    QuadBits taken{~0u};
    if (valid != nullptr) {
      if (mask_zero) clear_bits(valid, flat, zeros);
      if (m != nullptr) taken = load_changing_bits(valid, flat, n);
    }
    if (m == nullptr) return 0;  // the terms are 0
    const Quad<float> m4 = load_quad(m + flat, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) out.v[k] = taken[k] ? m4.v[k] * m4.v[k] : 0.0f;
    store_quad(terms, n, out);
    return 0;
  }

  bool mask_zero;
  const float* m;
  const float* v;
  float* vf;
  float* den;
  uint8_t* valid;
  float* sums_out;
  const GroupScalars* groups;
};

// Pass A.
struct FactorKernel : QuadOp {
  static constexpr uint32_t kSums = 2;
  static constexpr bool kMaximum = true;
  __device__ explicit FactorKernel(const Params& p)
      : FactorKernel(p, p.of<kernels::OnebitLambFactor>()) {}
  __device__ FactorKernel(const Params&, const kernels::OnebitLambFactorOperands<Operand>& o)
      : fresh{o.m.floats.flat<const float>(), o.m.bits.flat<const uint8_t>(),
              o.m.messages.flat<const uint8_t>()},
        old{o.old.floats.flat<const float>(), o.old.bits.flat<const uint8_t>(),
            o.old.messages.flat<const uint8_t>()},
        vf(o.vf.flat<float>()),
        den(o.den.flat<const float>()),
        parameters(&o.p),
        valid(o.valid.flat<const uint8_t>()),
        u0_sums(o.u0_sums.flat<float>()),
        u_sums(o.u_sums.flat<float>()),
        maxima_out(o.maxima.flat<float>()),
        groups(o.scalars.flat<const GroupScalars>()),
        states(o.states.flat<const TensorState>()) {}

  __device__ float* sums(uint32_t s) const { return s == 0 ? u0_sums : u_sums; }
  __device__ float* maxima() const { return maxima_out; }
  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float* terms) {
    const GroupScalars& s = groups[piece.group];
    const float scaling = scaling_of(states, piece);
    const uint64_t flat = piece.flat + j;
    const QuadBits taken = load_mask(valid, flat, n);
    const Quad<float> m = load_momentum(fresh, flat, n, fresh.magnitude(piece, scaling));
    const Quad<float> before = load_momentum(old, flat, n, old.magnitude(piece, scaling));
    const Quad<float> den4 = load_quad(den + flat, n);
    Quad<float> vf4 = load_quad(vf + flat, n);
    Quad<float> u0{};
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      if (!taken[k]) continue;
      vf4.v[k] = fresh_variance(s, m.v[k], before.v[k], vf4.v[k]);
      const float ratio = den4.v[k] / denominator(s, vf4.v[k]);
      // Bits of numbers that are not negative are in their order; NaN takes no part.
      if (ratio > std::bit_cast<float>(best)) best = std::bit_cast<uint32_t>(ratio);
      u0.v[k] = m.v[k] / den4.v[k];
    }
    store_quad(vf + flat, n, vf4);
    if (s.weight_decay == 0.0f) return 0;  // the terms are 0
    const Quad<float> p4 = load_quad(tensor_of<const float>(*parameters, piece) + j, n);
    Quad<float> u;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      u.v[k] = with_decay(s, u0.v[k], p4.v[k]);
      u.v[k] = u.v[k] * u.v[k];
      u0.v[k] = u0.v[k] * u0.v[k];
    }
    store_quad(terms, n, u0);
    store_quad(terms + kStaged, n, u);
    return 0;
  }

  Momentum fresh, old;
  float* vf;
  const float* den;
  const Operand* parameters;
  const uint8_t* valid;
  float* u0_sums;
  float* u_sums;
  float* maxima_out;
  const GroupScalars* groups;
  const TensorState* states;
  uint32_t best = 0;  // bits of the largest ratio
};

// Pass B.
struct MomentumUpdateKernel : QuadOp {
  __device__ explicit MomentumUpdateKernel(const Params& p)
      : MomentumUpdateKernel(p, p.of<kernels::MomentumUpdate>()) {}
  __device__ MomentumUpdateKernel(const Params&, const kernels::MomentumUpdateOperands<Operand>& o)
      : momentum{o.m.floats.flat<const float>(), o.m.bits.flat<const uint8_t>(),
                 o.m.messages.flat<const uint8_t>()},
        den(o.den.flat<const float>()),
        parameters(&o.p),
        valid(o.valid.flat<const uint8_t>()),
        groups(o.scalars.flat<const GroupScalars>()),
        steps(o.steps.flat<const TensorStep>()),
        states(o.states.flat<const TensorState>()) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    const GroupScalars& s = groups[piece.group];
    const float step = steps[piece.tensor].step_size;
    const float magnitude = momentum.magnitude(piece, scaling_of(states, piece));
    const uint64_t flat = piece.flat + j;
    float* at = tensor_of<float>(*parameters, piece) + j;
    const QuadBits taken = load_mask(valid, flat, n);
    const Quad<float> m = load_momentum(momentum, flat, n, magnitude);
    const Quad<float> den4 = load_quad(den + flat, n);
    Quad<float> p4 = load_quad(at, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      const float u0 = taken[k] ? m.v[k] / den4.v[k] : 0.0f;
      p4.v[k] = p4.v[k] - step * with_decay(s, u0, p4.v[k]);
    }
    store_quad(at, n, p4);
    return 0;
  }

  Momentum momentum;
  const float* den;
  const Operand* parameters;
  const uint8_t* valid;
  const GroupScalars* groups;
  const TensorStep* steps;
  const TensorState* states;
};

struct MomentumFromBitsKernel : QuadOp {
  __device__ explicit MomentumFromBitsKernel(const Params& p)
      : MomentumFromBitsKernel(p, p.of<kernels::MomentumFromBits>()) {}
  __device__ MomentumFromBitsKernel(const Params&,
                                    const kernels::MomentumFromBitsOperands<Operand>& o)
      : momentum{nullptr, o.bits.flat<const uint8_t>(), o.messages.flat<const uint8_t>()},
        states(o.states.flat<const TensorState>()),
        out(o.m.flat<float>()),
        valid(o.valid.flat<const uint8_t>()) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    const uint64_t flat = piece.flat + j;
    const float magnitude = momentum.magnitude(piece, scaling_of(states, piece));
    const QuadBits taken = load_mask(valid, flat, n);
    Quad<float> m = load_momentum(momentum, flat, n, magnitude);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) m.v[k] = taken[k] ? m.v[k] : 0.0f;
    store_quad(out + flat, n, m);
    return 0;
  }

  Momentum momentum;
  const TensorState* states;
  float* out;
  const uint8_t* valid;
};

}  // namespace sotto::cuda
