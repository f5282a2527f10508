// Encoders with 1 bit, taking them back, the server and the decoder. The three encoders differ in
// what they encode: an Input.
#pragma once

#include "cuda/kernels/quads.cuh"

namespace sotto::cuda {

// An Input has the kernel, whose operands `to` are what encoders share, and
//   Place place(const Piece&, uint64_t j)
//     of element j of a piece
//   bool plain(const Place&)
//     as an op's (quads.cuh)
//   Quad<float> load(const Place&, uint32_t i, N n)
//     x of elements i .. i + n - 1 from a place, any value where masked
//   float alone(const Place&, float x)
//     the average of one rank, for which nothing is encoded

__device__ inline float value_or_one(const float* factor) {
  return factor != nullptr ? *factor : 1.0f;  // a product with 1 is exact
}

// kOnebitEncode: a tensor, times a coefficient.
struct TensorInput {
  using Kernel = kernels::OnebitEncode;
  static constexpr uint32_t kBlocksAtOnce = 5;
  struct Place {
    Floats x;
    float by;
  };
  __device__ explicit TensorInput(const Params& p)
      : TensorInput(p, p.of<kernels::OnebitEncode>()) {}
  __device__ TensorInput(const Params& p, const kernels::OnebitEncodeOperands<Operand>& o)
      : source{&o.x, p.arguments<EncodeArgs>().source},
        coefficient(o.coefficient.flat<const float>()) {}

  __device__ Place place(const Piece& piece, uint64_t j) const {
    return {source.of(piece).from(j), value_or_one(coefficient)};
  }
  __device__ static bool plain(const Place& at) { return plain_floats(at.x); }
  template <class N>
  __device__ Quad<float> load(const Place& at, uint32_t i, N n) const {
    Quad<float> x = load_floats(at.x, i, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) x.v[k] = x.v[k] * at.by;
    return x;
  }

  Source source;
  const float* coefficient;
};

// kOnebitLambEncode: the momentum with the new gradient, scaled.
struct LambInput {
  using Kernel = kernels::OnebitLambEncode;
  static constexpr uint32_t kBlocksAtOnce = 4;
  __device__ explicit LambInput(const Params& p)
      : LambInput(p, p.of<kernels::OnebitLambEncode>()) {}
  __device__ LambInput(const Params& p, const kernels::OnebitLambEncodeOperands<Operand>& o)
      : source{&o.g, p.arguments<EncodeArgs>().source},
        momentum{o.m.floats.flat<const float>(), o.m.bits.flat<const uint8_t>(),
                 o.m.messages.flat<const uint8_t>()},
        groups(o.scalars.flat<const GroupScalars>()),
        states(o.states.flat<const TensorState>()),
        clip(o.clip.flat<const float>()) {}

  struct Place {
    Floats g;
    float by;
    MomentumAt m;
    GroupScalars s;
    float scaling;
  };
  __device__ Place place(const Piece& piece, uint64_t j) const {
    const float scaling = scaling_of(states, piece);
    return {source.of(piece).from(j), value_or_one(clip),
            MomentumAt(momentum, piece.flat + j, momentum.magnitude(piece, scaling)),
            groups[piece.group], scaling};
  }
  __device__ static bool plain(const Place& at) { return plain_floats(at.g) && at.m.plain(); }
  template <class N>
  __device__ Quad<float> load(const Place& at, uint32_t i, N n) const {
    Quad<float> x = load_floats(at.g, i, n);
    const Quad<float> m = at.m.load(i, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k)
      x.v[k] = onebit_lamb_input(at.s, m.v[k], x.v[k] * at.by, at.scaling);
    return x;
  }
  __device__ static float alone(const Place& at, float x) { return x / at.scaling; }

  Source source;
  Momentum momentum;
  const GroupScalars* groups;
  const TensorState* states;
  const float* clip;
};

// kZeroOneEncode: the sum of local updates, with this step's if there is a gradient.
struct ZeroOneInput {
  using Kernel = kernels::ZeroOneEncode;
  static constexpr uint32_t kBlocksAtOnce = 4;
  struct Place {
    Floats g;  // null: none
    float by;
    const float* m;
    const float* b;
    ZeroOneGroupScalars s;
  };
  __device__ explicit ZeroOneInput(const Params& p)
      : ZeroOneInput(p, p.of<kernels::ZeroOneEncode>()) {}
  __device__ ZeroOneInput(const Params& p, const kernels::ZeroOneEncodeOperands<Operand>& o)
      : source{&o.g, p.arguments<EncodeArgs>().source},
        m(o.m.flat<const float>()),
        b(o.b.flat<const float>()),
        groups(o.scalars.flat<const ZeroOneGroupScalars>()),
        clip(o.clip.flat<const float>()) {}

  __device__ Place place(const Piece& piece, uint64_t j) const {
    const uint64_t flat = piece.flat + j;
    if (source.operand->data == nullptr) return {{}, 1.0f, nullptr, b + flat, {}};
    return {source.of(piece).from(j), value_or_one(clip), m + flat, b + flat, groups[piece.group]};
  }
  __device__ static bool plain(const Place& at) {
    return quad_aligned(at.b) &&
           (at.g.data == nullptr || (plain_floats(at.g) && quad_aligned(at.m)));
  }
  template <class N>
  __device__ Quad<float> load(const Place& at, uint32_t i, N n) const {
    Quad<float> x = load_quad(at.b + i, n);
    if (at.g.data == nullptr) return x;
    const Quad<float> g = load_floats(at.g, i, n);
    const Quad<float> m4 = load_quad(at.m + i, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k)
      x.v[k] = zeroone_encode_input(at.s, m4.v[k], x.v[k], g.v[k] * at.by);
    return x;
  }
  __device__ static float alone(const Place&, float x) { return x; }

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
  static constexpr bool kPlain = true;
  static constexpr uint32_t kAtOnce = 2;
  static constexpr uint32_t kBlocksAtOnce = Input::kBlocksAtOnce;
  struct Place {
    typename Input::Place input;
    float* c;
    float old;
    uint64_t flat;
  };
  struct Values {
    Quad<float> x, c;
  };
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
  __device__ Place place(const Piece& piece, uint64_t j) const {
    const uint64_t flat = piece.flat + j;
    return {input.place(piece, j), c + flat, old_scales[piece.scale], flat};
  }
  __device__ bool plain(const Place& at) const {
    return valid == nullptr && quad_aligned(at.c) && input.plain(at.input);
  }
  template <class N, uint32_t kRounds>
  __device__ void load(const Place& at, uint32_t i, N n, Values (&values)[kRounds]) const {
#pragma unroll
    for (uint32_t q = 0; q < kRounds; ++q) {
      values[q].x = input.load(at.input, i + q * kRound, n);
      values[q].c = load_quad(at.c + i + q * kRound, n);
    }
  }
  template <class N>
  __device__ uint32_t step(const Place& at, uint32_t i, N n, const Values& values, float* terms) {
    const QuadBits taken = load_mask(valid, at.flat + i, n);
    Quad<float> next, squares;
    uint32_t ones = 0;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      float value = 0.0f;
      if (taken[k]) value = encode_value(values.x.v[k], values.c.v[k], at.old, &flags);
      next.v[k] = value;
      squares.v[k] = norm_term(scale, value);
      if (value >= 0.0f) ones |= 8u >> k;
    }
    store_quad(at.c + i, n, next);
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
    const QuadBits taken = load_mask(valid, flat, n);
    const typename Input::Place at = input.place(piece, j);
    Quad<float> x = input.load(at, 0, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      float value = 0.0f;
      if (taken[k]) value = guard_finite(input.alone(at, x.v[k]), &flags);
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
    const QuadBits taken = load_mask(valid, flat, n);
    // What was never encoded may still be under way to the device.
    const Quad<float> x = paired_ran ? input.load(input.place(piece, j), 0, n) : Quad<float>{};
    Quad<float> values = load_quad(c + flat, n);
    uint32_t unused = 0;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      const float in = guard_finite(x.v[k], &unused);
      values.v[k] = taken[k] ? undo_encode(values.v[k], in, old, paired_ran) : 0.0f;
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
  static constexpr bool kPlain = true;
  static constexpr uint32_t kBlocksAtOnce = 4;
  struct Place {
    Bits row;  // of rank 0
    const uint8_t* scale;
    const float* c;
    float* new_c;
    float old;
    uint64_t flat;
  };
  struct Values {
    Quad<float> sum, c;
  };
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
  __device__ Place place(const Piece& piece, uint64_t j) const {
    const uint64_t flat = piece.flat + j;
    return {Bits(rows, flat),
            messages + 4 * uint64_t{piece.message},
            c + flat,
            new_c + flat,
            old_scales[piece.scale],
            flat};
  }
  __device__ bool plain(const Place& at) const {
    return valid == nullptr && at.row.plain() && quad_aligned(at.c) && quad_aligned(at.new_c);
  }
  template <class N, uint32_t kRounds>
  __device__ void load(const Place& at, uint32_t i, N n, Values (&values)[kRounds]) const {
    Bits row = at.row;
    const uint8_t* scale = at.scale;
    Quad<float> sums[kRounds] = {};
    add_ranks(args.world, sums, [&](Quad<float>(&partial)[kRounds]) {
      const float term = message_scale(scale, 0) * part;
#pragma unroll
      for (uint32_t q = 0; q < kRounds; ++q)
        add_quad(row.load(i + q * kRound, n).plus_minus(term), &partial[q]);
      row.bytes += args.row_bytes;
      scale += scale_message_bytes(args.instances);
    });
#pragma unroll
    for (uint32_t q = 0; q < kRounds; ++q)
      values[q] = {sums[q], load_quad(at.c + i + q * kRound, n)};
  }
  template <class N>
  __device__ uint32_t step(const Place& at, uint32_t i, N n, const Values& values,
                           float* terms) const {
    const QuadBits taken = load_mask(valid, at.flat + args.valid_base + i, n);
    Quad<float> next, squares;
    uint32_t ones = 0;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      const float value = taken[k] ? values.sum.v[k] + residual_of(values.c.v[k], at.old) : 0.0f;
      next.v[k] = value;
      squares.v[k] = norm_term(args.scale, value);
      if (value >= 0.0f) ones |= 8u >> k;
    }
    store_quad(at.new_c + i, n, next);
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
  static constexpr bool kPlain = true;
  struct Place {
    Bits bits;
    float magnitude;
    float* y;
    uint64_t flat;
  };
  using Values = QuadBits;
  __device__ explicit DecodeKernel(const Params& p)
      : DecodeKernel(p, p.of<kernels::OnebitDecode>()) {}
  __device__ DecodeKernel(const Params&, const kernels::OnebitDecodeOperands<Operand>& o)
      : bits_in(o.bits.flat<const uint8_t>()),
        messages(o.messages.flat<const uint8_t>()),
        outputs(&o.y),
        valid(o.valid.flat<const uint8_t>()) {}

  __device__ Place place(const Piece& piece, uint64_t j) const {
    const uint64_t flat = piece.flat + j;
    return {Bits(bits_in, flat), message_scale(messages, piece.message),
            outputs->list<float>(piece.tensor) + piece.target + j, flat};
  }
  __device__ bool plain(const Place& at) const {
    return valid == nullptr && at.bits.plain() && quad_aligned(at.y);
  }
  template <class N, uint32_t kRounds>
  __device__ void load(const Place& at, uint32_t i, N n, Values (&values)[kRounds]) const {
#pragma unroll
    for (uint32_t q = 0; q < kRounds; ++q) values[q] = at.bits.load(i + q * kRound, n);
  }
  template <class N>
  __device__ uint32_t step(const Place& at, uint32_t i, N n, const Values& ones, float*) const {
    const QuadBits taken = load_mask(valid, at.flat + i, n);
    Quad<float> y = ones.plus_minus(at.magnitude);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) y.v[k] = taken[k] ? y.v[k] : 0.0f;
    store_quad(at.y + i, n, y);
    return 0;
  }

  const uint8_t* bits_in;
  const uint8_t* messages;
  const Operand* outputs;
  const uint8_t* valid;
};

}  // namespace sotto::cuda
