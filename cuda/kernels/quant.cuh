// Casts and blockwise integers. Encoders work on the flat space: a thread has a quad of it, and a
// block of 32 to 512 elements is what 8 to 128 neighbouring threads have at the same time, which
// share the largest magnitude.
#pragma once

#include <type_traits>

#include "core/kernels/quant_elements.h"
#include "cuda/kernels/quads.cuh"

namespace sotto::cuda {

// Devices have no division.
__device__ inline uint64_t quotient(uint64_t i, uint32_t power_of_two) {
  return i >> (31 - __clz(static_cast<int>(power_of_two)));
}
// Of the whole units before element i of a payload.
__device__ inline uint64_t bytes_before(const PayloadUnit& unit, uint64_t i) {
  return quotient(i, unit.elements) * unit.bytes;
}

// A place in a payload of one kind.
template <CodecKind kKind>
class PayloadAt {
 public:
  static constexpr bool kBlocks = codec_has_blocks(kKind);
  static constexpr uint32_t kAligned = kBlocks ? 4 : alignof(Quad<uint16_t>);

  __device__ PayloadAt(const uint8_t* payload, uint32_t block, uint64_t i)
      : size_(payload_unit(kKind, block)),
        unit_(payload + bytes_before(size_, i)),
        inside_(static_cast<uint32_t>(i) & (size_.elements - 1)) {}

  // Whether quads may be Whole, here and at multiples of 4 elements from here.
  __device__ bool plain() const {
    return reinterpret_cast<uintptr_t>(unit_) % kAligned == 0 && inside_ % kQuad == 0;
  }
  // The same place of a payload `bytes` behind.
  __device__ void advance(uint64_t bytes) { unit_ += bytes; }

  // The number of element i from here.
  __device__ float number(uint32_t i) const {
    if constexpr (kBlocks) return quant_number(kKind, unit(i), inside(i));
    uint16_t bits;
    std::memcpy(&bits, unit(i), 2);
    return half_value(kKind, bits);
  }
  // Of elements i .. i + n - 1, which are in one block.
  __device__ Quad<float> numbers(uint32_t i, uint32_t n) const {
    Quad<float> x{};
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      if (k < n) x.v[k] = number(i + k);
    }
    return x;
  }
  __device__ Quad<float> numbers(uint32_t i, Whole n) const {
    Quad<float> x;
    if constexpr (kBlocks) {
      constexpr uint32_t kBytes = codec_bits(kKind) * kQuad / 8;
      using Word = std::conditional_t<kBytes == 4, uint32_t,
                                      std::conditional_t<kBytes == 2, uint16_t, uint8_t>>;
      const Word word = *reinterpret_cast<const Word*>(unit(i) + inside(i) * kBytes / kQuad);
      uint8_t codes[kBytes];
      std::memcpy(codes, &word, kBytes);
#pragma unroll
      for (uint32_t k = 0; k < kQuad; ++k) x.v[k] = quant_number(kKind, codes, k);
    } else {
      const auto halves = load_quad(reinterpret_cast<const uint16_t*>(unit(i)), n);
#pragma unroll
      for (uint32_t k = 0; k < kQuad; ++k) x.v[k] = half_value(kKind, halves.v[k]);
    }
    return x;
  }
  // What these numbers count times: the scale of their block, any bits; for decoders a number.
  template <class N>
  __device__ float scale(uint32_t i, N n) const {
    return kBlocks ? stored_scale(unit(i, n), size_) : 1.0f;
  }
  template <class N>
  __device__ float decoding_scale(uint32_t i, N n) const {
    return kBlocks ? decoded_scale(unit(i, n), size_) : 1.0f;
  }

 private:
  __device__ const uint8_t* unit(uint32_t i, uint32_t) const { return unit(i); }
  __device__ const uint8_t* unit(uint32_t i, Whole) const {
    return std::assume_aligned<4>(unit(i));
  }
  __device__ const uint8_t* unit(uint32_t i) const {
    return unit_ + static_cast<uint32_t>(bytes_before(size_, inside_ + i));
  }
  __device__ uint32_t inside(uint32_t i) const { return (inside_ + i) & (size_.elements - 1); }

  const PayloadUnit size_;
  const uint8_t* unit_;
  const uint32_t inside_;
};

// Values of elements i .. i + n - 1 from a place.
template <CodecKind kKind>
__device__ inline Quad<float> decode_quad(const PayloadAt<kKind>& at, uint32_t i, uint32_t n) {
  Quad<float> y{};
#pragma unroll
  for (uint32_t k = 0; k < kQuad; ++k) {
    if (k < n) y.v[k] = at.number(i + k) * at.decoding_scale(i + k, 1u);
  }
  return y;
}
template <CodecKind kKind>
__device__ inline Quad<float> decode_quad(const PayloadAt<kKind>& at, uint32_t i, Whole n) {
  Quad<float> y = at.numbers(i, n);
  const float scale = at.decoding_scale(i, n);
#pragma unroll
  for (uint32_t k = 0; k < kQuad; ++k) y.v[k] = y.v[k] * scale;
  return y;
}

template <CodecKind kKind>
struct QuantDecodeKernel : QuadOp {
  static constexpr bool kPlain = true;
  static constexpr uint32_t kBlocksAtOnce = 6;
  struct Place {
    PayloadAt<kKind> from;
    float* y;
  };
  using Values = Quad<float>;
  __device__ explicit QuantDecodeKernel(const Params& p)
      : QuantDecodeKernel(p, p.of<kernels::QuantDecode>()) {}
  __device__ QuantDecodeKernel(const Params& p, const kernels::QuantDecodeOperands<Operand>& o)
      : block(p.arguments<QuantArgs>().block),
        payload(o.payload.flat<const uint8_t>()),
        outputs(&o.y) {}

  __device__ Place place(const Piece& piece, uint64_t j) const {
    return {{payload, block, piece.flat + j},
            outputs->list<float>(piece.tensor) + piece.target + j};
  }
  __device__ static bool plain(const Place& at) { return at.from.plain() && quad_aligned(at.y); }
  template <class N, uint32_t kRounds>
  __device__ void load(const Place& at, uint32_t i, N n, Values (&values)[kRounds]) const {
#pragma unroll
    for (uint32_t q = 0; q < kRounds; ++q) values[q] = decode_quad(at.from, i + q * kRound, n);
  }
  template <class N>
  __device__ uint32_t step(const Place& at, uint32_t i, N n, const Values& y, float*) const {
    store_quad(at.y + i, n, y);
    return 0;
  }

  uint32_t block;
  const uint8_t* payload;
  const Operand* outputs;
};

template <CodecKind kKind>
struct QuantUndoKernel : QuadOp {
  __device__ explicit QuantUndoKernel(const Params& p)
      : QuantUndoKernel(p, p.of<kernels::QuantEncodeUndo>()) {}
  __device__ QuantUndoKernel(const Params& p, const kernels::QuantEncodeOperands<Operand>& o)
      : args(p.arguments<QuantArgs>()),
        paired_ran(p.paired_ran),
        tensors(&o.x),
        e(o.e.flat<float>()),
        payload(o.payload.flat<const uint8_t>()) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    if (!paired_ran) return 0;
    const uint64_t flat = piece.flat + j;
    const Quad<float> x = load_quad(tensor_of<const float>(*tensors, piece) + j, n);
    const PayloadAt<kKind> from(payload, args.block, flat - args.base);
    const Quad<float> v = decode_quad(from, 0, n);
    Quad<float> e4 = load_quad(e + flat, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) e4.v[k] = quant_undo(e4.v[k], v.v[k], x.v[k]);
    store_quad(e + flat, n, e4);
    return 0;
  }

  const QuantArgs args;
  bool paired_ran;
  const Operand* tensors;
  float* e;
  const uint8_t* payload;
};

// What an encoder encodes, before the residual is added, of elements in one quad of the flat space:
// places and load() as an op's (quads.cuh). And the operand for the new residual.
template <CodecKind kCodec>
struct QuantTensors {
  using Kernel = kernels::QuantEncode;
  using Place = const float*;
  static constexpr CodecKind kKind = kCodec;
  static constexpr uint32_t kBlocksAtOnce = 6;
  __device__ static const Operand& residual(const kernels::QuantEncodeOperands<Operand>& o) {
    return o.e;
  }
  __device__ explicit QuantTensors(const Params& p)
      : base(p.arguments<QuantArgs>().base), tensors(&p.of<kernels::QuantEncode>().x) {}
  __device__ Place place(const Piece& piece, uint64_t j) const {
    return tensor_of<const float>(*tensors, piece) + j;
  }
  __device__ static bool plain(Place at) { return quad_aligned(at); }
  template <class N>
  __device__ Quad<float> load(Place at, uint32_t i, N n) const {
    return load_quad(at + i, n);
  }
  uint64_t base;  // flat index of the payload's first element
  const Operand* tensors;
};

// The mean of all ranks.
template <CodecKind kCodec>
struct QuantRows {
  using Kernel = kernels::QuantServer;
  using Place = PayloadAt<kCodec>;
  static constexpr CodecKind kKind = kCodec;
  static constexpr uint32_t kBlocksAtOnce = 4;
  __device__ static const Operand& residual(const kernels::QuantServerOperands<Operand>& o) {
    return o.new_e;
  }
  __device__ explicit QuantRows(const Params& p)
      : args(p.arguments<QuantArgs>()),
        part(1.0f / static_cast<float>(args.world)),
        rows(p.of<kernels::QuantServer>().rows.flat<const uint8_t>()) {}
  __device__ Place place(const Piece& piece, uint64_t j) const {
    return {rows, args.block, piece.flat + j};
  }
  __device__ bool plain(const Place& at) const {
    return at.plain() && args.row_bytes % Place::kAligned == 0;
  }
  template <class N>
  __device__ Quad<float> load(Place row, uint32_t i, N n) const {
    Quad<float> sum[1] = {};
    add_ranks(args.world, sum, [&](Quad<float>(&partial)[1]) {
      const float by = row.scale(i, n) * part;
      Quad<float> terms = row.numbers(i, n);
#pragma unroll
      for (uint32_t k = 0; k < kQuad; ++k) terms.v[k] = terms.v[k] * by;
      add_quad(terms, &partial[0]);
      row.advance(args.row_bytes);
    });
    return sum[0];
  }
  static constexpr uint64_t base = 0;
  const QuantArgs args;
  const float part;
  const uint8_t* rows;
};

template <class Input>
class QuantEncoder {
 public:
  __device__ explicit QuantEncoder(const Params& p)
      : params_(p),
        input_(p),
        args_(p.arguments<QuantArgs>()),
        old_(p.of<typename Input::Kernel>().e.template flat<const float>()),
        residual_(Input::residual(p.of<typename Input::Kernel>()).template flat<float>()),
        payload_(p.of<typename Input::Kernel>().payload.template flat<uint8_t>()) {}

  struct Place {
    typename Input::Place input;
    const float* e;
  };
  __device__ Place place(const Piece& piece, uint64_t j) const {
    return {input_.place(piece, j), old_ != nullptr ? old_ + piece.flat + j : nullptr};
  }
  __device__ bool plain(const Place& at) const {
    return input_.plain(at.input) && quad_aligned(at.e);
  }
  // c of elements i .. i + n - 1 from a place, in one quad of the flat space.
  template <class N>
  __device__ Quad<float> values(const Place& at, uint32_t i, N n) {
    const Quad<float> x = input_.load(at.input, i, n);
    Quad<float> e{}, c{};
    if (old_ != nullptr) e = load_quad(at.e + i, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      if (k >= n) continue;
      const float in = guard_finite(x.v[k], &flags_);
      c.v[k] = old_ != nullptr ? in + e.v[k] : in;
    }
    return c;
  }
  // c of a quad of the flat space, as far as runs have it; 0 elsewhere. Bit k of the result:
  // element k belongs to a run.
  __device__ uint32_t values(const Work& work, uint32_t position, Quad<float>* c) {
    uint32_t present = 0;
    *c = {};
    visit_quad(params_.runs + work.first_run, work.runs, position,
               [&](const Run& run, uint32_t begin, uint32_t n) {
                 const Piece& piece = params_.pieces[run.piece];
                 const uint32_t at = begin - position;
                 present |= ((1u << n) - 1u) << at;
                 if (piece.tensor == kNoTensor) return;
                 put(values(place(piece, run.first + (begin - run.position)), 0, n), at, n, c);
               });
    return present;
  }
  // The codes of a quad, and what is left of c. max_bits: of the block.
  __device__ void write(uint64_t flat, uint32_t present, const Quad<float>& c, uint32_t max_bits) {
    if (present == 0) return;
    if constexpr (codec_has_blocks(Input::kKind)) {
      write_block(flat, c, max_bits);
    } else {
      write_half(flat, present, c);
    }
  }
  __device__ void finish() {
    raise_on_device(params_.of<typename Input::Kernel>().flags.template flat<uint32_t>(), flags_);
  }

 private:
  __device__ void write_half(uint64_t flat, uint32_t present, const Quad<float>& c) {
    auto* out = reinterpret_cast<uint16_t*>(payload_) + (flat - input_.base);
    Quad<uint16_t> codes;
    Quad<float> left;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      codes.v[k] = guarded_half_code(Input::kKind, c.v[k], &flags_);
      left.v[k] = c.v[k] - half_value(Input::kKind, codes.v[k]);
    }
    if (present == 0xfu) {
      store_quad(out, kQuad, codes);
      if (residual_ != nullptr) store_quad(residual_ + flat, kQuad, left);
      return;
    }
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      if ((present >> k & 1) == 0) continue;
      out[k] = codes.v[k];
      if (residual_ != nullptr) residual_[flat + k] = left.v[k];
    }
  }
  __device__ void write_block(uint64_t flat, const Quad<float>& c, uint32_t max_bits) {
    const PayloadUnit unit = payload_unit(Input::kKind, args_.block);
    uint8_t* out = payload_ + bytes_before(unit, flat - input_.base);
    const auto inside = static_cast<uint32_t>(flat) & (args_.block - 1);
    uint32_t raised = 0;
    const QuantScale s = quant_scale(Input::kKind, max_bits, &raised);
    Quad<float> left;
    float numbers[kQuad];
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      numbers[k] = quant_round(s, c.v[k]);
      left.v[k] = c.v[k] - numbers[k] * s.scale;
    }
    const uint32_t per_byte = 8 / codec_bits(Input::kKind);
    if (per_byte == 1) {
      Quad<uint8_t> bytes;
#pragma unroll
      for (uint32_t k = 0; k < kQuad; ++k) bytes.v[k] = packed_codes(Input::kKind, numbers + k);
      store_quad(out + inside, kQuad, bytes);
    } else {
      for (uint32_t k = 0; k < kQuad; k += per_byte)
        out[(inside + k) / per_byte] = packed_codes(Input::kKind, numbers + k);
    }
    if (residual_ != nullptr) store_quad(residual_ + flat, kQuad, left);
    if (inside != 0) return;
    flags_ |= raised;
    std::memcpy(out + unit.bytes - 4, &s.scale, 4);
  }

  const Params& params_;
  Input input_;
  const QuantArgs args_;
  const float* old_;
  float* residual_;
  uint8_t* payload_;
  uint32_t flags_ = 0;
};

// Blocks of integers that the threads of a thread block have in one round.
inline constexpr uint32_t kBlocksPerRound = kRound / kMinQuantBlock;

// Calls values(i, &c) for the quads of a thread, each kRound positions behind the one before, which
// says what c is and which of its elements belong to a run, and encodes them. largest: 0 for every
// block of every round.
template <class Input, class Values>
__device__ inline void encode_quads(QuantEncoder<Input>* encoder, uint64_t first, uint32_t block,
                                    uint32_t end, uint32_t* largest, Values&& values) {
  const uint32_t in_round = threadIdx.x * kQuad;
  for (uint32_t i = 0; i < end; i += kRound) {
    Quad<float> c;
    const uint32_t present = values(i, &c);
    uint32_t max_bits = 0;
    if constexpr (codec_has_blocks(Input::kKind)) {
      uint32_t* shared = &largest[i / kRound * kBlocksPerRound + quotient(in_round, block)];
#pragma unroll
      for (uint32_t k = 0; k < kQuad; ++k) {
        const uint32_t bits = magnitude_bits(c.v[k]);
        max_bits = bits > max_bits ? bits : max_bits;
      }
      atomicMax(shared, max_bits);
      __syncthreads();
      max_bits = *shared;
    }
    encoder->write(first + i + in_round, present, c, max_bits);
  }
}

template <class Input>
__global__ void __launch_bounds__(kThreads, room_for(Input::kBlocksAtOnce))
    quant_encode(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  __shared__ uint32_t largest[kQuadsPerThread * kBlocksPerRound];
  static_assert(kQuadsPerThread * kBlocksPerRound == kThreads);
  largest[threadIdx.x] = 0;
  __syncthreads();
  QuantEncoder<Input> encoder(params);
  const Work work = params.work[blockIdx.x];
  const Run run = params.runs[work.first_run];
  const Piece& piece = params.pieces[run.piece];
  const auto encode = [&](uint32_t end, auto&& values) {
    encode_quads(&encoder, work.block * kNormBlock, params.arguments<QuantArgs>().block, end,
                 largest, values);
  };
  if (whole_block(run, piece)) {
    const auto at = encoder.place(piece, run.first + threadIdx.x * kQuad);
    if (encoder.plain(at)) {
      encode(kNormBlock, [&](uint32_t i, Quad<float>* c) {
        *c = encoder.values(at, i, Whole());
        return 0xfu;
      });
      encoder.finish();
      return;
    }
  }
  const Run last = params.runs[work.first_run + work.runs - 1];
  encode(last.position + last.count, [&](uint32_t i, Quad<float>* c) {
    return encoder.values(work, i + threadIdx.x * kQuad, c);
  });
  encoder.finish();
}

}  // namespace sotto::cuda
