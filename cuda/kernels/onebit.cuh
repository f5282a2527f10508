// Encoders with 1 bit, taking them back, the server and the decoder. The three encoders differ in
// what they encode: an Input.
#pragma once

#include "cuda/kernels/quads.cuh"

namespace sotto::cuda {

// An Input has the kernel, whose operands `to` are what encoders share, and
//   Quad<float> load(const Piece&, uint64_t j, uint32_t n)
//     x of elements j .. j + n - 1, any value where masked
//   float alone(const Piece&, float x)
//     the average of one rank, for which nothing is encoded

// kOnebitEncode: a tensor, times a coefficient.
struct TensorInput {
  using Kernel = kernels::OnebitEncode;
  __device__ explicit TensorInput(const Params& p)
      : TensorInput(p, p.of<kernels::OnebitEncode>()) {}
  __device__ TensorInput(const Params& p, const kernels::OnebitEncodeOperands<Operand>& o)
      : source{&o.x, p.arguments<EncodeArgs>().source},
        coefficient(o.coefficient.flat<const float>()) {}

  __device__ Quad<float> load(const Piece& piece, uint64_t j, uint32_t n) const {
    Quad<float> x = load_floats(source.of(piece), j, n);
    const float by = coefficient != nullptr ? *coefficient : 1.0f;  // a product with 1 is exact
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) x.v[k] = x.v[k] * by;
    return x;
  }

  Source source;
  const float* coefficient;
};

// kOnebitLambEncode: the momentum with the new gradient, scaled.
struct LambInput {
  using Kernel = kernels::OnebitLambEncode;
  __device__ explicit LambInput(const Params& p)
      : LambInput(p, p.of<kernels::OnebitLambEncode>()) {}
  __device__ LambInput(const Params& p, const kernels::OnebitLambEncodeOperands<Operand>& o)
      : source{&o.g, p.arguments<EncodeArgs>().source},
        momentum{o.m.floats.flat<const float>(), o.m.bits.flat<const uint8_t>(),
                 o.m.messages.flat<const uint8_t>()},
        groups(o.scalars.flat<const GroupScalars>()),
        states(o.states.flat<const TensorState>()),
        clip(o.clip.flat<const float>()) {}

  __device__ Quad<float> load(const Piece& piece, uint64_t j, uint32_t n) const {
    const GroupScalars& s = groups[piece.group];
    const float scaling = scaling_of(states, piece);
    const float magnitude = momentum.magnitude(piece, scaling);
    Quad<float> x = load_floats(source.of(piece), j, n);
    const float by = clip != nullptr ? *clip : 1.0f;
    const Quad<float> m = load_momentum(momentum, piece.flat + j, n, magnitude);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k)
      x.v[k] = onebit_lamb_input(s, m.v[k], x.v[k] * by, scaling);
    return x;
  }
  __device__ float alone(const Piece& piece, float x) const {
    return x / scaling_of(states, piece);
  }

  Source source;
  Momentum momentum;
  const GroupScalars* groups;
  const TensorState* states;
  const float* clip;
};

// kZeroOneEncode: the sum of local updates, with this step's if there is a gradient.
struct ZeroOneInput {
  using Kernel = kernels::ZeroOneEncode;
  __device__ explicit ZeroOneInput(const Params& p)
      : ZeroOneInput(p, p.of<kernels::ZeroOneEncode>()) {}
  __device__ ZeroOneInput(const Params& p, const kernels::ZeroOneEncodeOperands<Operand>& o)
      : source{&o.g, p.arguments<EncodeArgs>().source},
        m(o.m.flat<const float>()),
        b(o.b.flat<const float>()),
        groups(o.scalars.flat<const ZeroOneGroupScalars>()),
        clip(o.clip.flat<const float>()) {}

  __device__ Quad<float> load(const Piece& piece, uint64_t j, uint32_t n) const {
    Quad<float> x = load_quad(b + piece.flat + j, n);
    if (source.operand->data == nullptr) return x;
    const ZeroOneGroupScalars& s = groups[piece.group];
    const Quad<float> g = load_floats(source.of(piece), j, n);
    const Quad<float> m4 = load_quad(m + piece.flat + j, n);
    const float by = clip != nullptr ? *clip : 1.0f;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k)
      x.v[k] = zeroone_encode_input(s, m4.v[k], x.v[k], g.v[k] * by);
    return x;
  }
  __device__ float alone(const Piece&, float x) const { return x; }

  Source source;
  const float* m;
  const float* b;
  const ZeroOneGroupScalars* groups;
  const float* clip;
};

template <class Input>
struct EncodeKernel : QuadOp {
  static constexpr uint32_t kSums = 1;
  static constexpr bool kBits = true;
  __device__ explicit EncodeKernel(const Params& p)
      : EncodeKernel(p, p.of<typename Input::Kernel>().to) {}
  __device__ EncodeKernel(const Params& p, const kernels::EncoderOperands<Operand>& o)
      : input(p),
        scale(p.arguments<EncodeArgs>().scale),
        bits_base(p.arguments<EncodeArgs>().bits_base),
        c(o.c.flat<float>()),
        old_scales(o.old_scales.flat<const float>()),
        out(o.bits.flat<uint8_t>()),
        sums_out(o.sums.flat<float>()),
        valid(o.valid.flat<const uint8_t>()),
        flags_out(o.flags.flat<uint32_t>()) {}

  __device__ float* sums(uint32_t) const { return sums_out; }
  __device__ uint8_t* bits(const Piece& piece, uint64_t* first) const {
    *first = piece.flat - bits_base;
    return out;
  }
  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float* terms) {
    const uint64_t flat = piece.flat + j;
    const float old = old_scales[piece.scale];
    const uint32_t taken = load_bits(valid, flat, n) & ((1u << n) - 1u);
    const Quad<float> x = input.load(piece, j, n);
    Quad<float> values = load_quad(c + flat, n);
    Quad<float> squares;
    uint32_t ones = 0;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      float value = 0.0f;
      if ((taken >> k & 1) != 0) value = encode_value(x.v[k], values.v[k], old, &flags);
      values.v[k] = value;
      squares.v[k] = norm_term(scale, value);
      ones |= static_cast<uint32_t>(value >= 0.0f) << k;
    }
    store_quad(c + flat, n, values);
    store_quad(terms, n, squares);
    return ones;
  }
  __device__ void finish() { raise_on_device(flags_out, flags); }

  Input input;
  ScaleKind scale;
  uint64_t bits_base;
  float* c;
  const float* old_scales;
  uint8_t* out;
  float* sums_out;
  const uint8_t* valid;
  uint32_t* flags_out;
  uint32_t flags = 0;
};

// One rank: nothing is encoded.
template <class Input>
struct AloneKernel : QuadOp {
  __device__ explicit AloneKernel(const Params& p)
      : AloneKernel(p, p.of<typename Input::Kernel>().to) {}
  __device__ AloneKernel(const Params& p, const kernels::EncoderOperands<Operand>& o)
      : input(p),
        c(o.c.flat<float>()),
        valid(o.valid.flat<const uint8_t>()),
        flags_out(o.flags.flat<uint32_t>()) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) {
    const uint64_t flat = piece.flat + j;
    const uint32_t taken = load_bits(valid, flat, n) & ((1u << n) - 1u);
    Quad<float> x = input.load(piece, j, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      float value = 0.0f;
      if ((taken >> k & 1) != 0) value = guard_finite(input.alone(piece, x.v[k]), &flags);
      x.v[k] = value;
    }
    store_quad(c + flat, n, x);
    return 0;
  }
  __device__ void finish() { raise_on_device(flags_out, flags); }

  Input input;
  float* c;
  const uint8_t* valid;
  uint32_t* flags_out;
  uint32_t flags = 0;
};

template <class Input>
struct EncodeUndoKernel : QuadOp {
  __device__ explicit EncodeUndoKernel(const Params& p)
      : EncodeUndoKernel(p, p.of<typename Input::Kernel>().to) {}
  __device__ EncodeUndoKernel(const Params& p, const kernels::EncoderOperands<Operand>& o)
      : input(p),
        paired_ran(p.paired_ran),
        c(o.c.flat<float>()),
        old_scales(o.old_scales.flat<const float>()),
        valid(o.valid.flat<const uint8_t>()) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    const uint64_t flat = piece.flat + j;
    const float old = old_scales[piece.scale];
    const uint32_t taken = load_bits(valid, flat, n) & ((1u << n) - 1u);
    // What was never encoded may still be under way to the device.
    const Quad<float> x = paired_ran ? input.load(piece, j, n) : Quad<float>{};
    Quad<float> values = load_quad(c + flat, n);
    uint32_t unused = 0;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      const float in = guard_finite(x.v[k], &unused);
      values.v[k] = (taken >> k & 1) != 0 ? undo_encode(values.v[k], in, old, paired_ran) : 0.0f;
    }
    store_quad(c + flat, n, values);
    return 0;
  }

  Input input;
  bool paired_ran;
  float* c;
  const float* old_scales;
  const uint8_t* valid;
};

struct ServerKernel : QuadOp {
  static constexpr uint32_t kSums = 1;
  static constexpr bool kBits = true;
  __device__ explicit ServerKernel(const Params& p)
      : ServerKernel(p, p.of<kernels::OnebitServer>()) {}
  __device__ ServerKernel(const Params& p, const kernels::OnebitServerOperands<Operand>& o)
      : args(p.arguments<ServerArgs>()),
        part(1.0f / static_cast<float>(args.world)),
        rows(o.rows.flat<const uint8_t>()),
        messages(o.messages.flat<const uint8_t>()),
        c(o.c.flat<const float>()),
        old_scales(o.old_scales.flat<const float>()),
        out(o.bits.flat<uint8_t>()),
        sums_out(o.sums.flat<float>()),
        valid(o.valid.flat<const uint8_t>()),
        new_c(o.new_c.flat<float>()) {}

  __device__ float* sums(uint32_t) const { return sums_out; }
  __device__ uint8_t* bits(const Piece& piece, uint64_t* first) const {
    *first = piece.flat;
    return out;
  }
  // Sums over ranks of four elements: groups of 8, each from 0 in ascending order.
  __device__ Quad<float> average(const Piece& piece, uint64_t flat, uint32_t n) const {
    Quad<float> total{};
    for (uint32_t group = 0; group < args.world; group += 8) {
      Quad<float> partial{};
      const uint32_t end = group + 8 < args.world ? group + 8 : args.world;
      for (uint32_t r = group; r < end; ++r) {
        const float term = message_scale(messages, r * (args.instances + 1) + piece.message) * part;
        const uint32_t ones = load_bits(rows + r * args.row_bytes, flat, n);
#pragma unroll
        for (uint32_t k = 0; k < kQuad; ++k) partial.v[k] += plus_minus(ones >> k & 1, term);
      }
#pragma unroll
      for (uint32_t k = 0; k < kQuad; ++k) total.v[k] += partial.v[k];
    }
    return total;
  }
  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float* terms) const {
    const uint64_t flat = piece.flat + j;
    const float old = old_scales[piece.scale];
    const uint32_t taken = load_bits(valid, flat + args.valid_base, n);
    const Quad<float> sum = average(piece, flat, n);
    Quad<float> values = load_quad(c + flat, n);
    Quad<float> squares;
    uint32_t ones = 0;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      const float value = (taken >> k & 1) != 0 ? sum.v[k] + residual_of(values.v[k], old) : 0.0f;
      values.v[k] = value;
      squares.v[k] = norm_term(args.scale, value);
      ones |= static_cast<uint32_t>(value >= 0.0f) << k;
    }
    store_quad(new_c + flat, n, values);
    store_quad(terms, n, squares);
    return ones;
  }

  const ServerArgs args;
  const float part;
  const uint8_t* rows;
  const uint8_t* messages;
  const float* c;
  const float* old_scales;
  uint8_t* out;
  float* sums_out;
  const uint8_t* valid;
  float* new_c;
};

struct DecodeKernel : QuadOp {
  __device__ explicit DecodeKernel(const Params& p)
      : DecodeKernel(p, p.of<kernels::OnebitDecode>()) {}
  __device__ DecodeKernel(const Params&, const kernels::OnebitDecodeOperands<Operand>& o)
      : bits_in(o.bits.flat<const uint8_t>()),
        messages(o.messages.flat<const uint8_t>()),
        outputs(&o.y),
        valid(o.valid.flat<const uint8_t>()) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    const uint64_t flat = piece.flat + j;
    const float magnitude = message_scale(messages, piece.message);
    const uint32_t ones = load_bits(bits_in, flat, n);
    const uint32_t taken = load_bits(valid, flat, n);
    Quad<float> y;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k)
      y.v[k] = (taken >> k & 1) != 0 ? plus_minus(ones >> k & 1, magnitude) : 0.0f;
    store_quad(outputs->list<float>(piece.tensor) + piece.target + j, n, y);
    return 0;
  }

  const uint8_t* bits_in;
  const uint8_t* messages;
  const Operand* outputs;
  const uint8_t* valid;
};

}  // namespace sotto::cuda
