// 0/1 Adam.
#pragma once

#include "cuda/kernels/adam.cuh"
#include "cuda/kernels/onebit_lamb.cuh"

namespace sotto::cuda {

struct FrozenAdamKernel : QuadOp {
  __device__ explicit FrozenAdamKernel(const Params& p)
      : FrozenAdamKernel(p, p.of<kernels::FrozenAdam>()) {}
  __device__ FrozenAdamKernel(const Params& p, const kernels::FrozenAdamOperands<Operand>& o)
      : gradients{{&o.g, p.arguments<SourceArgs>().source},
                  o.clip.flat<const float>(),
                  o.valid.flat<const uint8_t>()},
        mean{nullptr, o.bits.flat<const uint8_t>(), o.messages.flat<const uint8_t>()},
        m(o.m.flat<float>()),
        v(o.v.flat<const float>()),
        parameters(&o.p),
        groups(o.scalars.flat<const ZeroOneGroupScalars>()) {}

  // The averaged gradient, floats or bits.
  __device__ Quad<float> gradient(const Piece& piece, uint64_t j, uint32_t n) const {
    if (mean.bits == nullptr) return gradients.load(piece, j, n);
    const QuadBits taken = load_mask(gradients.valid, piece.flat + j, n);
    Quad<float> g = load_momentum(mean, piece.flat + j, n, mean.magnitude(piece, 1.0f));
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) g.v[k] = taken[k] ? g.v[k] : 0.0f;
    return g;
  }
  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    const ZeroOneGroupScalars& s = groups[piece.group];
    const float lr = static_cast<float>(s.lr);
    const uint64_t flat = piece.flat + j;
    float* at = tensor_of<float>(*parameters, piece) + j;
    const Quad<float> g = gradient(piece, j, n);
    const Quad<float> v4 = load_quad(v + flat, n);
    Quad<float> m4 = load_quad(m + flat, n);
    Quad<float> p4 = load_quad(at, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k)
      frozen_adam_element(s, lr, g.v[k], &m4.v[k], v4.v[k], &p4.v[k]);
    store_quad(m + flat, n, m4);
    store_quad(at, n, p4);
    return 0;
  }

  Gradients gradients;
  Momentum mean;
  float* m;
  const float* v;
  const Operand* parameters;
  const ZeroOneGroupScalars* groups;
};

struct ZeroOneLocalKernel : QuadOp {
  static constexpr uint32_t kBlocksAtOnce = 4;
  __device__ explicit ZeroOneLocalKernel(const Params& p)
      : ZeroOneLocalKernel(p, p.of<kernels::ZeroOneLocal>()) {}
  __device__ ZeroOneLocalKernel(const Params& p, const kernels::ZeroOneLocalOperands<Operand>& o)
      : gradients{{&o.g, p.arguments<SourceArgs>().source},
                  o.clip.flat<const float>(),
                  o.valid.flat<const uint8_t>()},
        m(o.m.flat<float>()),
        b(o.b.flat<float>()),
        den(o.den.flat<const float>()),
        anchor(o.anchor.flat<const float>()),
        parameters(&o.p),
        groups(o.scalars.flat<const ZeroOneGroupScalars>()) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    const ZeroOneGroupScalars& s = groups[piece.group];
    const float lr = static_cast<float>(s.lr);
    const uint64_t flat = piece.flat + j;
    const QuadBits taken = load_mask(gradients.valid, flat, n);
    const Quad<float> g = gradients.load(piece, j, n);
    const Quad<float> den4 = load_quad(den + flat, n);
    const Quad<float> anchor4 = load_quad(anchor + flat, n);
    Quad<float> m4 = load_quad(m + flat, n);
    Quad<float> b4 = load_quad(b + flat, n);
    Quad<float> p4;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k)
      zeroone_local_element(s, lr, !taken[k], g.v[k], &m4.v[k], &b4.v[k], den4.v[k], anchor4.v[k],
                            &p4.v[k]);
    store_quad(m + flat, n, m4);
    store_quad(b + flat, n, b4);
    store_quad(tensor_of<float>(*parameters, piece) + j, n, p4);
    return 0;
  }

  Gradients gradients;
  float* m;
  float* b;
  const float* den;
  const float* anchor;
  const Operand* parameters;
  const ZeroOneGroupScalars* groups;
};

struct ZeroOneSyncKernel : QuadOp {
  static constexpr uint32_t kBlocksAtOnce = 4;
  __device__ explicit ZeroOneSyncKernel(const Params& p)
      : ZeroOneSyncKernel(p, p.of<kernels::ZeroOneSync>()) {}
  __device__ ZeroOneSyncKernel(const Params&, const kernels::ZeroOneSyncOperands<Operand>& o)
      : mean{o.x.floats.flat<const float>(), o.x.bits.flat<const uint8_t>(),
             o.x.messages.flat<const uint8_t>()},
        m(o.m.flat<float>()),
        b(o.b.flat<float>()),
        den(o.den.flat<const float>()),
        anchor(o.anchor.flat<float>()),
        parameters(&o.p),
        groups(o.scalars.flat<const ZeroOneGroupScalars>()),
        valid(o.valid.flat<const uint8_t>()) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    const ZeroOneGroupScalars& s = groups[piece.group];
    const uint64_t flat = piece.flat + j;
    const QuadBits taken = load_mask(valid, flat, n);
    const Quad<float> x = load_momentum(mean, flat, n, mean.magnitude(piece, 1.0f));
    const Quad<float> den4 = load_quad(den + flat, n);
    Quad<float> m4 = load_quad(m + flat, n);
    Quad<float> anchor4 = load_quad(anchor + flat, n);
    Quad<float> b4, p4;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k)
      zeroone_sync_element(s, !taken[k], x.v[k], &m4.v[k], &b4.v[k], den4.v[k], &anchor4.v[k],
                           &p4.v[k]);
    store_quad(m + flat, n, m4);
    store_quad(b + flat, n, b4);
    store_quad(anchor + flat, n, anchor4);
    store_quad(tensor_of<float>(*parameters, piece) + j, n, p4);
    return 0;
  }

  Momentum mean;
  float* m;
  float* b;
  const float* den;
  float* anchor;
  const Operand* parameters;
  const ZeroOneGroupScalars* groups;
  const uint8_t* valid;
};

// 0/1 Adam as published: what its three kernels share.
struct InPlaceOp : QuadOp {
  struct Values {
    Quad<float> m, b, den, p;
  };
  __device__ explicit InPlaceOp(const Params& p)
      : InPlaceOp(p, p.of<kernels::ZeroOneInPlaceLocal>()) {}
  __device__ InPlaceOp(const Params& p, const kernels::InPlaceOperands<Operand>& o)
      : gradients{{&o.g, p.arguments<SourceArgs>().source}, o.clip.flat<const float>(), nullptr},
        m(o.m.flat<float>()),
        b(o.b.flat<float>()),
        den(o.den.flat<const float>()),
        parameters(&o.p),
        groups(o.scalars.flat<const ZeroOneGroupScalars>()) {}

  __device__ float* parameter(const Piece& piece, uint64_t j) const {
    return tensor_of<float>(*parameters, piece) + j;
  }
  // After a local update; without gradients as they are.
  __device__ Values updated(const Piece& piece, uint64_t j, uint32_t n) const {
    const uint64_t flat = piece.flat + j;
    Values now{load_quad(m + flat, n), load_quad(b + flat, n), load_quad(den + flat, n),
               load_quad(parameter(piece, j), n)};
    if (gradients.source.operand->data == nullptr) return now;
    const Quad<float> g = gradients.load(piece, j, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k)
      zeroone_in_place_element(groups[piece.group], g.v[k], &now.m.v[k], &now.b.v[k], now.den.v[k],
                               &now.p.v[k]);
    return now;
  }
  __device__ void store(const Piece& piece, uint64_t j, uint32_t n, const Values& now) const {
    store_quad(m + piece.flat + j, n, now.m);
    store_quad(b + piece.flat + j, n, now.b);
    store_quad(parameter(piece, j), n, now.p);
  }

  Gradients gradients;
  float* m;
  float* b;
  const float* den;
  const Operand* parameters;
  const ZeroOneGroupScalars* groups;
};

struct ZeroOneInPlaceLocalKernel : InPlaceOp {
  __device__ explicit ZeroOneInPlaceLocalKernel(const Params& p) : InPlaceOp(p) {}
  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    store(piece, j, n, updated(piece, j, n));
    return 0;
  }
};

struct ZeroOneInPlaceSumKernel : InPlaceOp {
  __device__ explicit ZeroOneInPlaceSumKernel(const Params& p)
      : ZeroOneInPlaceSumKernel(p, p.of<kernels::ZeroOneInPlaceSum>()) {}
  __device__ ZeroOneInPlaceSumKernel(const Params& p,
                                     const kernels::ZeroOneInPlaceSumOperands<Operand>& o)
      : InPlaceOp(p), out(&o.x), flags_out(o.flags.flat<uint32_t>()) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) {
    const Values now = updated(piece, j, n);
    Quad<float> x;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      x.v[k] = now.b.v[k] * now.den.v[k];
      if (k < n) guard_finite(x.v[k], &flags);
    }
    store_quad(tensor_of<float>(*out, piece) + j, n, x);
    return 0;
  }
  __device__ void finish() { raise_on_device(flags_out, flags); }

  const Operand* out;
  uint32_t* flags_out;
  uint32_t flags = 0;
};

struct ZeroOneInPlaceSyncKernel : InPlaceOp {
  __device__ explicit ZeroOneInPlaceSyncKernel(const Params& p)
      : ZeroOneInPlaceSyncKernel(p, p.of<kernels::ZeroOneInPlaceSync>()) {}
  __device__ ZeroOneInPlaceSyncKernel(const Params& p,
                                      const kernels::ZeroOneInPlaceSyncOperands<Operand>& o)
      : InPlaceOp(p),
        floats(&o.x),
        mean{nullptr, o.bits.flat<const uint8_t>(), o.messages.flat<const uint8_t>()},
        valid(o.valid.flat<const uint8_t>()) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    const uint64_t flat = piece.flat + j;
    Values now = updated(piece, j, n);
    const QuadBits taken = load_mask(valid, flat, n);
    const Quad<float> x = floats->data != nullptr
                              ? load_quad(tensor_of<const float>(*floats, piece) + j, n)
                              : load_momentum(mean, flat, n, mean.magnitude(piece, 1.0f));
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k)
      zeroone_in_place_sync_element(groups[piece.group], taken[k] ? x.v[k] : 0.0f, &now.m.v[k],
                                    &now.b.v[k], now.den.v[k], &now.p.v[k]);
    store(piece, j, n, now);
    return 0;
  }

  const Operand* floats;
  Momentum mean;
  const uint8_t* valid;
};

}  // namespace sotto::cuda
