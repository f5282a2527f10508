// Encoders with 1 bit, taking them back, the server and the decoder. The three encoders differ in
// what they encode: an Input.
#pragma once

#include "cuda/kernels/quads.cuh"

namespace sotto::cuda {

// An Input has the indices of the operands that encoders share, and
//   Quad<float> load(const Piece&, uint64_t j, uint32_t n)
// x of elements j .. j + n - 1, any value where masked. And
// of one rank, for whom nothing is encoded: float alone(const Piece&, float x), what the average
// is.

// kOnebitEncode: a tensor, times a coefficient.
struct TensorInput {
  enum : uint32_t { kC = 1, kOld = 2, kOut = 3, kBlockSums = 4, kValid = 5, kFlags = 6 };
  __device__ explicit TensorInput(const Params& p)
      : source{&p.operands[0], p.arguments<EncodeArgs>().source},
        coefficient(p.operands[7].flat<const float>()) {}

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
  enum : uint32_t { kC = 4, kOld = 5, kOut = 6, kBlockSums = 7, kValid = 8, kFlags = 9 };
  __device__ explicit LambInput(const Params& p)
      : source{&p.operands[0], p.arguments<EncodeArgs>().source},
        momentum{p.operands[1].flat<const float>(), p.operands[2].flat<const uint8_t>(),
                 p.operands[3].flat<const uint8_t>()},
        groups(p.operands[10].flat<const GroupScalars>()),
        states(p.operands[11].flat<const TensorState>()),
        clip(p.operands[12].flat<const float>()) {}

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
struct LocalInput {
  enum : uint32_t { kC = 3, kOld = 4, kOut = 5, kBlockSums = 6, kValid = 7, kFlags = 8 };
  __device__ explicit LocalInput(const Params& p)
      : source{&p.operands[0], p.arguments<EncodeArgs>().source},
        m(p.operands[1].flat<const float>()),
        b(p.operands[2].flat<const float>()),
        groups(p.operands[9].flat<const GroupScalars>()),
        clip(p.operands[10].flat<const float>()) {}

  __device__ Quad<float> load(const Piece& piece, uint64_t j, uint32_t n) const {
    Quad<float> x = load_quad(b + piece.flat + j, n);
    if (source.operand->data == nullptr) return x;
    const GroupScalars& s = groups[piece.group];
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
  const GroupScalars* groups;
  const float* clip;
};

template <class Input>
struct EncodeKernel : QuadOp {
  static constexpr uint32_t kSums = 1;
  static constexpr bool kBits = true;
  __device__ explicit EncodeKernel(const Params& p)
      : input(p),
        scale(p.arguments<EncodeArgs>().scale),
        bits_base(p.arguments<EncodeArgs>().bits_base),
        c(p.operands[Input::kC].template flat<float>()),
        old_scales(p.operands[Input::kOld].template flat<const float>()),
        out(p.operands[Input::kOut].template flat<uint8_t>()),
        sums_out(p.operands[Input::kBlockSums].template flat<float>()),
        valid(p.operands[Input::kValid].template flat<const uint8_t>()),
        flags_out(p.operands[Input::kFlags].template flat<uint32_t>()) {}

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
      : input(p),
        c(p.operands[Input::kC].template flat<float>()),
        valid(p.operands[Input::kValid].template flat<const uint8_t>()),
        flags_out(p.operands[Input::kFlags].template flat<uint32_t>()) {}

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
      : input(p),
        paired_ran(p.paired_ran),
        c(p.operands[Input::kC].template flat<float>()),
        old_scales(p.operands[Input::kOld].template flat<const float>()),
        valid(p.operands[Input::kValid].template flat<const uint8_t>()) {}

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
      : args(p.arguments<ServerArgs>()),
        part(1.0f / static_cast<float>(args.world)),
        rows(p.operands[0].flat<const uint8_t>()),
        messages(p.operands[1].flat<const uint8_t>()),
        c(p.operands[2].flat<const float>()),
        old_scales(p.operands[3].flat<const float>()),
        out(p.operands[4].flat<uint8_t>()),
        sums_out(p.operands[5].flat<float>()),
        valid(p.operands[6].flat<const uint8_t>()),
        new_c(p.operands[7].flat<float>()) {}

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
      : bits_in(p.operands[0].flat<const uint8_t>()),
        messages(p.operands[1].flat<const uint8_t>()),
        outputs(&p.operands[2]),
        valid(p.operands[3].flat<const uint8_t>()) {}

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
