// Pack, unpack, conversions, sums of micro-batches and the reduction over ranks.
#pragma once

#include "core/kernels/reduce_elements.h"
#include "cuda/kernels/quads.cuh"

namespace sotto::cuda {

// T: an element's bytes as an integer.
template <class T>
struct PackKernel : QuadOp {
  __device__ explicit PackKernel(const Params& p) : PackKernel(p, p.of<kernels::Pack>()) {}
  __device__ PackKernel(const Params& p, const kernels::PackOperands<Operand>& o)
      : base(p.arguments<PackArgs>().flat_base), tensors(&o.tensors), flat(o.flat.flat<T>()) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    store_quad(flat + (piece.flat + j - base), n,
               load_quad(tensor_of<const T>(*tensors, piece) + j, n));
    return 0;
  }

  uint64_t base;
  const Operand* tensors;
  T* flat;
};

template <class T>
struct UnpackKernel : QuadOp {
  __device__ explicit UnpackKernel(const Params& p) : UnpackKernel(p, p.of<kernels::Unpack>()) {}
  __device__ UnpackKernel(const Params& p, const kernels::UnpackOperands<Operand>& o)
      : base(p.arguments<PackArgs>().flat_base),
        flat(o.flat.flat<const T>()),
        tensors(&o.tensors) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    store_quad(tensors->list<T>(piece.tensor) + piece.target + j, n,
               load_quad(flat + (piece.flat + j - base), n));
    return 0;
  }

  uint64_t base;
  const T* flat;
  const Operand* tensors;
};

struct ConvertKernel : QuadOp {
  __device__ explicit ConvertKernel(const Params& p) : ConvertKernel(p, p.of<kernels::Convert>()) {}
  __device__ ConvertKernel(const Params& p, const kernels::ConvertOperands<Operand>& o)
      : args(p.arguments<ConvertArgs>()), from{&o.x, args.from}, to(&o.y) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    Quad<float> x = load_floats(from.of(piece), j, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) x.v[k] = x.v[k] * args.factor;
    if (args.to == Dtype::kF32) {
      store_quad(tensor_of<float>(*to, piece) + j, n, x);
      return 0;
    }
    Quad<uint16_t> y;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) y.v[k] = narrow(args.to, x.v[k]);
    store_quad(tensor_of<uint16_t>(*to, piece) + j, n, y);
    return 0;
  }

  const ConvertArgs args;
  Source from;
  const Operand* to;
};

struct AccumulateKernel : QuadOp {
  __device__ explicit AccumulateKernel(const Params& p)
      : AccumulateKernel(p, p.of<kernels::Accumulate>()) {}
  __device__ AccumulateKernel(const Params& p, const kernels::AccumulateOperands<Operand>& o)
      : first(p.arguments<AccumulateArgs>().first),
        from{&o.x, p.arguments<AccumulateArgs>().source},
        sums_list(&o.sum),
        factor(o.factor.flat<const double>()) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    const float by = factor != nullptr ? static_cast<float>(*factor) : 1.0f;
    float* at = tensor_of<float>(*sums_list, piece) + j;
    const Quad<float> x = load_floats(from.of(piece), j, n);
    Quad<float> s{};
    if (!first) s = load_quad(at, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) s.v[k] = (first ? x.v[k] : s.v[k] + x.v[k]) * by;
    store_quad(at, n, s);
    return 0;
  }

  bool first;
  Source from;
  const Operand* sums_list;
  const double* factor;
};

template <class Type>
struct ReduceKernel : QuadOp {
  using Stored = typename Type::Stored;
  using Wide = typename Type::Wide;
  __device__ explicit ReduceKernel(const Params& p) : ReduceKernel(p, p.of<kernels::Reduce>()) {}
  __device__ ReduceKernel(const Params& p, const kernels::ReduceOperands<Operand>& o)
      : args(p.arguments<ReduceArgs>()),
        own(&o.own),
        rows(o.rows.flat<const Stored>()),
        out(&o.out),
        flags_out(o.flags.flat<uint32_t>()) {}

  template <ReduceOp kOp>
  __device__ Quad<Stored> reduce(const Stored* mine, uint64_t row_at, uint32_t n) const {
    using Sum = Accumulator<kOp, Wide>;
    Sum acc[kQuad] = {};
    for (uint32_t first = 0, end = 0; first < args.world; first = end) {
      end = end_of_group(first, args.group, args.world);
      Sum part[kQuad] = {};
      for (uint32_t r = first; r < end; ++r) {
        const Stored* from = r == args.own_rank ? mine : rows + r * args.row_stride + row_at;
        const Quad<Stored> x = load_quad(from, n);
#pragma unroll
        for (uint32_t k = 0; k < kQuad; ++k) {
          const Sum wide = Type::widen(x.v[k]);
          part[k] = r == first ? wide : combine<kOp>(part[k], wide);
        }
      }
#pragma unroll
      for (uint32_t k = 0; k < kQuad; ++k)
        acc[k] = first == 0 ? part[k] : combine<kOp>(acc[k], part[k]);
    }
    Quad<Stored> result;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      if constexpr (kOp == ReduceOp::kMean) acc[k] = divide(acc[k], args.world);
      result.v[k] = Type::narrow(static_cast<Wide>(acc[k]));
    }
    return result;
  }
  __device__ Quad<Stored> reduce_as(const Stored* mine, uint64_t row_at, uint32_t n) const {
    switch (args.op) {
      case ReduceOp::kSum: return reduce<ReduceOp::kSum>(mine, row_at, n);
      case ReduceOp::kMean: return reduce<ReduceOp::kMean>(mine, row_at, n);
      case ReduceOp::kMin: return reduce<ReduceOp::kMin>(mine, row_at, n);
      case ReduceOp::kMax: return reduce<ReduceOp::kMax>(mine, row_at, n);
      case ReduceOp::kProd: return reduce<ReduceOp::kProd>(mine, row_at, n);
      case ReduceOp::kBitOr:
        if constexpr (std::is_integral_v<Wide>) return reduce<ReduceOp::kBitOr>(mine, row_at, n);
        break;  // refused at the C ABI
    }
    return {};
  }
  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) {
    const uint64_t flat = piece.flat + j;
    const Stored* mine = args.own_flat ? own->flat<const Stored>() + (flat - args.own_base)
                                       : tensor_of<const Stored>(*own, piece) + j;
    Stored* to = args.out_flat ? out->flat<Stored>() + (flat - args.out_base)
                               : out->list<Stored>(piece.tensor) + piece.target + j;
    const Quad<Stored> result = reduce_as(mine, flat - args.row_base, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      if (k < n && !Type::finite(result.v[k])) flags = kFlagNonfinite;
    }
    store_quad(to, n, result);
    return 0;
  }
  __device__ void finish() { raise_on_device(flags_out, flags); }

  const ReduceArgs args;
  const Operand* own;
  const Stored* rows;
  const Operand* out;
  uint32_t* flags_out;
  uint32_t flags = 0;
};

}  // namespace sotto::cuda
