// Steps with momentum and variance in fewer bits than float32 (core/base/low_precision_state.h). A
// thread block takes one norm block; kStateBlock positions of it, which share an exponent if they
// are 8-bit floats, are what 64 neighbouring threads have at the same time.
#pragma once

#include "core/base/low_precision_state.h"
#include "core/kernels/quant_elements.h"
#include "cuda/kernels/rules.cuh"

namespace sotto::cuda {

// The operands of a low-precision step by moment: 0 is m, 1 is v.
struct LowPrecisionAdam : AdamRule {
  __device__ explicit LowPrecisionAdam(const Params& p)
      : AdamRule(p.of<kernels::AdamLowPrecision>().adam, p.arguments<LowPrecisionArgs>().source) {}
  __device__ static const Operand& step_of(const Params& p) {
    return p.of<kernels::AdamLowPrecision>().step;
  }
  __device__ static const Operand& moment(const Params& p, uint32_t index) {
    const auto& o = p.of<kernels::AdamLowPrecision>();
    return index == 0 ? o.adam.m : o.adam.v;
  }
  __device__ static const Operand& exponents(const Params& p, uint32_t index) {
    const auto& o = p.of<kernels::AdamLowPrecision>();
    return index == 0 ? o.m_exponents : o.v_exponents;
  }
};

// The old or the new exponents of four positions, which are in one state block.
struct StateBases {
  uint32_t m, v;
};

template <class Rule>
class LowPrecisionStep {
 public:
  __device__ LowPrecisionStep(const Params& p, const Work& work)
      : params_(p),
        work_(work),
        rule_(p),
        fp8_(p.arguments<LowPrecisionArgs>().state == StateType::kFp8),
        key_(rounding_key(*Rule::step_of(p).template flat<const uint64_t>(), work.block)) {}

  __device__ bool fp8() const { return fp8_; }

  // Elements at `position` and the three behind it: parameters move, and the new moments are
  // returned; 0 where there is no element.
  __device__ void step(uint32_t position, Quad<float>* m, Quad<float>* v) const {
    StateBases bases{};
    if (fp8_) {
      bases.m = fp8_base(exponents(0)[state_block(position)], kFp8LargestM);
      if (Rule::kVariance) bases.v = fp8_base(exponents(1)[state_block(position)], kFp8LargestV);
    }
    visit(position, [&](const Piece& piece, uint64_t j, uint32_t at, uint32_t n) {
      Quad<float> m4 = load_m(piece.flat + j, n, bases);
      Quad<float> v4{};
      if (Rule::kVariance) v4 = load_v(piece.flat + j, n, bases);
      rule_.step(piece, j, n, &m4, &v4);
#pragma unroll
      for (uint32_t k = 0; fp8_ && k < kQuad; ++k) {
        m4.v[k] = within(m4.v[k], kFp8Limit);
        v4.v[k] = at_most(v4.v[k], kFp8Limit);
      }
      put(m4, at, n, m);
      put(v4, at, n, v);
    });
  }

  // Rounds them. most_m, most_v: largest magnitudes of the state block, if they are 8-bit floats.
  __device__ void keep(uint32_t position, const Quad<float>& m, const Quad<float>& v, float most_m,
                       float most_v) const {
    StateBases bases{};
    if (fp8_) {
      const uint8_t m_exponent = fp8_m_exponent(most_m);
      const uint8_t v_exponent = fp8_v_exponent(most_v);
      bases = {fp8_base(m_exponent, kFp8LargestM), fp8_base(v_exponent, kFp8LargestV)};
      if (position % kStateBlock == 0 && has_elements(position)) {
        exponents(0)[state_block(position)] = m_exponent;
        if (Rule::kVariance) exponents(1)[state_block(position)] = v_exponent;
      }
    }
    if (fp8_) {
      keep_codes<uint8_t>(position, [&](uint32_t k, uint32_t random, uint8_t* m_code) {
        *m_code = fp8_m_code(m.v[k], bases.m, random >> 12);
        return fp8_v_code(v.v[k], bases.v, random & 0xfffffu);
      });
    } else {
      keep_codes<uint16_t>(position, [&](uint32_t k, uint32_t random, uint16_t* m_code) {
        *m_code = bf16_m_code(m.v[k], random);
        return bf16_v_code(v.v[k], random);
      });
    }
  }

 private:
  template <class T>
  __device__ T* array(uint32_t index) const {
    return Rule::moment(params_, index).template flat<T>();
  }
  __device__ uint8_t* exponents(uint32_t index) const {
    return Rule::exponents(params_, index).template flat<uint8_t>();
  }
  __device__ uint64_t state_block(uint32_t position) const {
    return work_.block * kStateBlocksPerNormBlock + position / kStateBlock;
  }
  template <class Visit>
  __device__ void visit(uint32_t position, Visit&& visit) const {
    visit_quad(params_.runs + work_.first_run, work_.runs, position,
               [&](const Run& run, uint32_t begin, uint32_t n) {
                 const Piece& piece = params_.pieces[run.piece];
                 if (piece.tensor == kNoTensor) return;
                 visit(piece, run.first + (begin - run.position), begin - position, n);
               });
  }
  __device__ bool has_elements(uint32_t position) const {
    bool found = false;
    visit(position, [&](const Piece&, uint64_t, uint32_t, uint32_t) { found = true; });
    return found;
  }
  __device__ Quad<float> load_m(uint64_t flat, uint32_t n, const StateBases& bases) const {
    if (!fp8_) return load_floats(bfloats(0), flat, n);
    const Quad<uint8_t> codes = load_quad(array<uint8_t>(0) + flat, n);
    Quad<float> x;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) x.v[k] = fp8_m_value(codes.v[k], bases.m);
    return x;
  }
  __device__ Quad<float> load_v(uint64_t flat, uint32_t n, const StateBases& bases) const {
    if (!fp8_) return load_floats(bfloats(1), flat, n);
    const Quad<uint8_t> codes = load_quad(array<uint8_t>(1) + flat, n);
    Quad<float> x;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) x.v[k] = fp8_v_value(codes.v[k], bases.v);
    return x;
  }
  __device__ Floats bfloats(uint32_t index) const {
    return {array<const uint8_t>(index), Dtype::kBF16};
  }
  // Stores what code(k, random bits, code of m) makes of element k, which is the code of v.
  template <class T, class Code>
  __device__ void keep_codes(uint32_t position, Code&& code) const {
    Quad<T> m_codes, v_codes;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k)
      v_codes.v[k] = code(k, rounding_bits(key_, position + k), &m_codes.v[k]);
    visit(position, [&](const Piece& piece, uint64_t j, uint32_t at, uint32_t n) {
      const uint64_t flat = piece.flat + j;
      store_quad(array<T>(0) + flat, n, moved_down(m_codes, at));
      if (Rule::kVariance) store_quad(array<T>(1) + flat, n, moved_down(v_codes, at));
    });
  }

  const Params& params_;
  const Work work_;
  const Rule rule_;
  const bool fp8_;
  const RoundingKey key_;
};

// Largest magnitude of four values.
__device__ inline uint32_t largest_bits(const Quad<float>& x) {
  uint32_t most = 0;
#pragma unroll
  for (uint32_t k = 0; k < kQuad; ++k) {
    const uint32_t bits = magnitude_bits(x.v[k]);
    most = bits > most ? bits : most;
  }
  return most;
}

template <class Rule>
__global__ void __launch_bounds__(kThreads)
    low_precision_step(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  __shared__ uint32_t largest[2][kStateBlocksPerNormBlock];
  static_assert(2 * kStateBlocksPerNormBlock <= kThreads);
  if (threadIdx.x < kStateBlocksPerNormBlock) largest[0][threadIdx.x] = largest[1][threadIdx.x] = 0;
  __syncthreads();
  const Work work = params.work[blockIdx.x];
  const LowPrecisionStep<Rule> state(params, work);
  const Run last = params.runs[work.first_run + work.runs - 1];
  const uint32_t end = last.position + last.count;
  for (uint32_t first = 0; first < end; first += kThreads * kQuad) {
    const uint32_t position = first + threadIdx.x * kQuad;
    Quad<float> m{}, v{};
    state.step(position, &m, &v);
    float most_m = 0.0f, most_v = 0.0f;
    if (state.fp8()) {
      const uint32_t block = position / kStateBlock;
      atomicMax(&largest[0][block], largest_bits(m));
      atomicMax(&largest[1][block], largest_bits(v));
      __syncthreads();
      most_m = std::bit_cast<float>(largest[0][block]);
      most_v = std::bit_cast<float>(largest[1][block]);
    }
    state.keep(position, m, v, most_m, most_v);
  }
}

}  // namespace sotto::cuda
