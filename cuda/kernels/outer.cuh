// Outer optimizers.
#pragma once

#include "core/kernels/outer_elements.h"
#include "cuda/kernels/scalars.cuh"

namespace sotto::cuda {

// What all messages say. All threads of the block call this.
__device__ inline OuterVotes count_votes(const OuterMessage* messages, uint32_t world) {
  OuterVotes votes;
  for (uint32_t first = 0; first < world; first += blockDim.x) {
    const uint32_t r = first + threadIdx.x;
    const bool there = r < world;
    votes.ranks += static_cast<uint32_t>(__syncthreads_count(there && messages[r].weight != 0));
    votes.flagged |= __syncthreads_or(there && messages[r].flags != 0) != 0;
  }
  return votes;
}

struct OuterDeltaKernel : QuadOp {
  static constexpr uint32_t kSums = 1;
  static constexpr bool kPlain = true;
  struct Place {
    const float* x;
    const float* anchor;
    float* y;
  };
  struct Values {
    Quad<float> x, anchor;
  };
  __device__ explicit OuterDeltaKernel(const Params& p)
      : OuterDeltaKernel(p, p.of<kernels::OuterDelta>()) {}
  __device__ OuterDeltaKernel(const Params& p, const kernels::OuterDeltaOperands<Operand>& o)
      : params(p.arguments<OuterDeltaArgs>().params),
        tensors(&o.x),
        anchor(o.anchor.flat<const float>()),
        y(o.y.flat<float>()),
        flags_out(o.flags.flat<uint32_t>()),
        sums_out(o.sums.flat<float>()) {}

  __device__ float* sums(uint32_t) const { return sums_out; }
  __device__ Place place(const Piece& piece, uint64_t j) const {
    const uint64_t flat = piece.flat + j;
    return {tensor_of<const float>(*tensors, piece) + j, anchor + flat,
            y != nullptr ? y + flat : nullptr};
  }
  __device__ static bool plain(const Place& at) {
    return quad_aligned(at.x) && quad_aligned(at.anchor) && quad_aligned(at.y);
  }
  template <class N, uint32_t kRounds>
  __device__ void load(const Place& at, uint32_t i, N n, Values (&values)[kRounds]) const {
#pragma unroll
    for (uint32_t q = 0; q < kRounds; ++q)
      values[q] = {load_quad(at.x + i + q * kRound, n), load_quad(at.anchor + i + q * kRound, n)};
  }
  template <class N>
  __device__ uint32_t step(const Place& at, uint32_t i, N n, const Values& v, float* terms) {
    Quad<float> d, squares;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      d.v[k] = v.anchor.v[k] - v.x.v[k];
      squares.v[k] = d.v[k] * d.v[k];
    }
    store_quad(terms, n, squares);
    if (at.y == nullptr) return 0;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      if (params) d.v[k] = v.x.v[k];
      if (k < n) guard_finite(d.v[k], &flags);
    }
    store_quad(at.y + i, n, d);
    return 0;
  }
  __device__ void finish() { raise_on_device(flags_out, flags); }

  bool params;
  const Operand* tensors;
  const float* anchor;
  float* y;
  uint32_t* flags_out;
  float* sums_out;
  uint32_t flags = 0;
};

struct OuterNormKernel : QuadOp {
  static constexpr uint32_t kSums = 1;
  static constexpr bool kPlain = true;
  struct Place {
    const float* sum;
    const float* anchor;
  };
  struct Values {
    Quad<float> sum, anchor;
  };
  __device__ explicit OuterNormKernel(const Params& p)
      : OuterNormKernel(p.arguments<OuterNormArgs>(), p.of<kernels::OuterNorm>()) {}
  __device__ OuterNormKernel(const OuterNormArgs& a, const kernels::OuterNormOperands<Operand>& o)
      : sum(o.sum.flat<const float>()),
        anchor(o.anchor.flat<const float>()),
        sums_out(o.sums.flat<float>()),
        mean(outer_mean(a.divided,
                        count_votes(o.messages.flat<const OuterMessage>(), a.world).ranks)) {}

  __device__ float* sums(uint32_t) const { return sums_out; }
  __device__ Place place(const Piece& piece, uint64_t j) const {
    const uint64_t flat = piece.flat + j;
    return {sum + flat, anchor != nullptr ? anchor + flat : nullptr};
  }
  __device__ static bool plain(const Place& at) {
    return quad_aligned(at.sum) && quad_aligned(at.anchor);
  }
  template <class N, uint32_t kRounds>
  __device__ void load(const Place& at, uint32_t i, N n, Values (&values)[kRounds]) const {
#pragma unroll
    for (uint32_t q = 0; q < kRounds; ++q) {
      values[q].sum = load_quad(at.sum + i + q * kRound, n);
      values[q].anchor =
          at.anchor != nullptr ? load_quad(at.anchor + i + q * kRound, n) : Quad<float>{};
    }
  }
  template <class N>
  __device__ uint32_t step(const Place& at, uint32_t, N n, Values v, float* terms) const {
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      const float u = outer_average(at.anchor != nullptr, v.sum.v[k], mean, v.anchor.v[k]);
      v.sum.v[k] = u * u;
    }
    store_quad(terms, n, v.sum);
    return 0;
  }

  const float* sum;
  const float* anchor;
  float* sums_out;
  float mean;
};

__device__ inline Quad<float> load_or_zero(const float* values, uint64_t flat, uint32_t n) {
  return values != nullptr ? load_quad(values + flat, n) : Quad<float>{};
}

// What the kernels of the step share.
struct OuterStepBase : QuadOp {
  __device__ explicit OuterStepBase(const Params& p)
      : OuterStepBase(p.arguments<OuterStepArgs>(), p.of<kernels::OuterStep>()) {}
  __device__ OuterStepBase(const OuterStepArgs& a, const kernels::OuterStepOperands<Operand>& o)
      : arrays(a, o),
        element(a, o.numbers.flat<const OuterNumbers>(), arrays.fresh != nullptr),
        factors(o.factors.flat<const OuterFactor>()),
        tensors(&o.x) {}

  // From elements of the sum.
  __device__ Quad<float> gradient(const Piece& piece, uint64_t flat, uint32_t n,
                                  const Quad<float>& sum) const {
    const float inv_lambda = inv_lambda_of(element.a, factors, piece);
    const Quad<float> start = load_or_zero(arrays.start, flat, n);
    const Quad<float> last = load_or_zero(arrays.last, flat, n);
    const Quad<float> fresh = load_or_zero(arrays.fresh, flat, n);
    const Quad<float> previous = load_or_zero(arrays.previous, flat, n);
    Quad<float> g;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k)
      g.v[k] = element.gradient({sum.v[k], start.v[k], last.v[k], fresh.v[k], previous.v[k]},
                                inv_lambda);
    return g;
  }
  __device__ void merge(const Piece& piece, uint64_t j, uint32_t n,
                        const Quad<float>& anchor) const {
    if (tensors->data == nullptr) return;
    float* live = tensor_of<float>(*tensors, piece) + j;
    Quad<float> x{};
    if (element.a.merge != OuterMerge::kReset) x = load_quad(live, n);
    const Quad<float> start = load_or_zero(arrays.x_launch, piece.flat + j, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) x.v[k] = element.merged(x.v[k], anchor.v[k], start.v[k]);
    store_quad(live, n, x);
  }

  OuterArrays arrays;
  OuterElement element;
  const OuterFactor* factors;
  const Operand* tensors;
};

// Pass kMomentum.
struct OuterMomentumKernel : OuterStepBase {
  static constexpr uint32_t kSums = 1;
  __device__ explicit OuterMomentumKernel(const Params& p)
      : OuterStepBase(p), m_sums(p.of<kernels::OuterStep>().m_sums.flat<float>()) {}

  __device__ float* sums(uint32_t) const { return m_sums; }
  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float* terms) const {
    const uint64_t flat = piece.flat + j;
    const Quad<float> g = gradient(piece, flat, n, load_or_zero(arrays.sum, flat, n));
    Quad<float> m = load_quad(arrays.m + flat, n);
    Quad<float> squares;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      m.v[k] = element.momentum(m.v[k], g.v[k]);
      squares.v[k] = m.v[k] * m.v[k];
    }
    store_quad(arrays.m + flat, n, m);
    store_quad(terms, n, squares);
    return 0;
  }

  float* m_sums;
};

// Passes kWhole and kUpdate.
struct OuterMoveKernel : OuterStepBase {
  static constexpr uint32_t kSums = 2;
  __device__ explicit OuterMoveKernel(const Params& p)
      : OuterStepBase(p),
        step_sums(p.of<kernels::OuterStep>().step_sums.flat<float>()),
        clipped(p.of<kernels::OuterStep>().clipped.flat<float>()) {}

  __device__ float* sums(uint32_t s) const { return s == 0 ? step_sums : clipped; }
  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float* terms) const {
    const uint64_t flat = piece.flat + j;
    Quad<float> sum{}, g{};
    if (element.has_gradient()) {
      sum = load_or_zero(arrays.sum, flat, n);
      g = gradient(piece, flat, n, sum);
    }
    Quad<float> m = load_or_zero(arrays.m, flat, n);
    Quad<float> anchor = load_quad(arrays.anchor + flat, n);
    Quad<float> step, squares, changed;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      if (element.adds_gradient()) m.v[k] = element.momentum(m.v[k], g.v[k]);
      const OuterMove to = element.move(m.v[k], g.v[k], sum.v[k], anchor.v[k]);
      m.v[k] = to.m;
      step.v[k] = to.step;
      anchor.v[k] = to.anchor;
      squares.v[k] = to.change * to.change;
      changed.v[k] = to.clipped ? 1.0f : 0.0f;
    }
    if (arrays.m != nullptr) store_quad(arrays.m + flat, n, m);
    if (arrays.last_step != nullptr) store_quad(arrays.last_step + flat, n, step);
    store_quad(arrays.anchor + flat, n, anchor);
    store_quad(terms, n, squares);
    store_quad(terms + kStaged, n, changed);
    merge(piece, j, n, anchor);
    return 0;
  }

  float* step_sums;
  float* clipped;
};

// Pass kMerge.
struct OuterMergeKernel : OuterStepBase {
  __device__ explicit OuterMergeKernel(const Params& p) : OuterStepBase(p) {}
  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    merge(piece, j, n, load_quad(arrays.anchor + piece.flat + j, n));
    return 0;
  }
};

}  // namespace sotto::cuda
