// Casts and blockwise integers. Encoders work on the flat space: a thread has a quad of it, and a
// block of 32 to 512 elements is what 8 to 128 neighbouring threads have at the same time, which
// share the largest magnitude.
#pragma once

#include "core/kernels/quant_elements.h"
#include "cuda/kernels/quads.cuh"

namespace sotto::cuda {

// Four codes of 16 bits, any alignment of payloads that even addresses have.
__device__ inline Quad<uint16_t> load_codes(const uint8_t* payload, uint64_t i, uint32_t n) {
  return load_quad(reinterpret_cast<const uint16_t*>(payload) + i, n);
}

// Values of elements i .. i + n - 1 of a payload, all in one block.
__device__ inline Quad<float> decode_quad(const QuantArgs& a, const uint8_t* payload, uint64_t i,
                                          uint32_t n) {
  Quad<float> y{};
  if (!codec_has_blocks(a.kind)) {
    const Quad<uint16_t> codes = load_codes(payload, i, n);
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) y.v[k] = half_value(a.kind, codes.v[k]);
    return y;
  }
  const PayloadUnit unit = payload_unit(a.kind, a.block);
#pragma unroll
  for (uint32_t k = 0; k < kQuad; ++k) {
    if (k >= n) continue;
    const uint8_t* at = payload + unit.bytes_of(i + k);
    const auto inside = static_cast<uint32_t>((i + k) % a.block);
    y.v[k] = quant_number(a.kind, at, inside) * decoded_scale(at, unit);
  }
  return y;
}

struct QuantDecodeKernel : QuadOp {
  __device__ explicit QuantDecodeKernel(const Params& p)
      : QuantDecodeKernel(p, p.of<kernels::QuantDecode>()) {}
  __device__ QuantDecodeKernel(const Params& p, const kernels::QuantDecodeOperands<Operand>& o)
      : args(p.arguments<QuantArgs>()), payload(o.payload.flat<const uint8_t>()), outputs(&o.y) {}

  __device__ uint32_t quad(const Piece& piece, uint64_t j, uint32_t n, float*) const {
    store_quad(outputs->list<float>(piece.tensor) + piece.target + j, n,
               decode_quad(args, payload, piece.flat + j, n));
    return 0;
  }

  const QuantArgs args;
  const uint8_t* payload;
  const Operand* outputs;
};

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
    const Quad<float> v = decode_quad(args, payload, flat - args.base, n);
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

// What an encoder encodes: Quad<float> load(piece, j, n), before the residual is added. And the
// operand for the new residual.
struct QuantTensors {
  using Kernel = kernels::QuantEncode;
  __device__ static const Operand& residual(const kernels::QuantEncodeOperands<Operand>& o) {
    return o.e;
  }
  __device__ explicit QuantTensors(const Params& p)
      : base(p.arguments<QuantArgs>().base), tensors(&p.of<kernels::QuantEncode>().x) {}
  __device__ Quad<float> load(const Piece& piece, uint64_t j, uint32_t n) const {
    return load_quad(tensor_of<const float>(*tensors, piece) + j, n);
  }
  uint64_t base;  // flat index of the payload's first element
  const Operand* tensors;
};

// The mean of all ranks.
struct QuantRows {
  using Kernel = kernels::QuantServer;
  __device__ static const Operand& residual(const kernels::QuantServerOperands<Operand>& o) {
    return o.new_e;
  }
  __device__ explicit QuantRows(const Params& p)
      : args(p.arguments<QuantArgs>()),
        rows(p.of<kernels::QuantServer>().rows.flat<const uint8_t>()) {}
  __device__ float term(uint32_t r, uint64_t flat, float part) const {
    const uint8_t* row = rows + r * args.row_bytes;
    if (!codec_has_blocks(args.kind)) {
      uint16_t code;
      std::memcpy(&code, row + 2 * flat, 2);
      return half_value(args.kind, code) * part;
    }
    const PayloadUnit unit = payload_unit(args.kind, args.block);
    const uint8_t* at = row + unit.bytes_of(flat);
    const auto inside = static_cast<uint32_t>(flat % args.block);
    return quant_number(args.kind, at, inside) * (stored_scale(at, unit) * part);
  }
  __device__ Quad<float> load(const Piece& piece, uint64_t j, uint32_t n) const {
    const float part = 1.0f / static_cast<float>(args.world);
    Quad<float> sum{};
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      if (k >= n) continue;
      const uint64_t flat = piece.flat + j + k;
      sum.v[k] = sum_of_ranks(args.world, [&](uint32_t r) { return term(r, flat, part); });
    }
    return sum;
  }
  static constexpr uint64_t base = 0;
  const QuantArgs args;
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
                 const uint64_t j = run.first + (begin - run.position);
                 const Quad<float> x = input_.load(piece, j, n);
                 Quad<float> e{};
                 if (old_ != nullptr) e = load_quad(old_ + piece.flat + j, n);
                 place(x, e, at, n, c);
               });
    return present;
  }
  // The codes of a quad, and what is left of c. max_bits: of the block.
  __device__ void write(uint64_t flat, uint32_t present, const Quad<float>& c, uint32_t max_bits) {
    if (present == 0) return;
    if (codec_has_blocks(args_.kind)) {
      write_block(flat, c, max_bits);
    } else {
      write_half(flat, present, c);
    }
  }
  __device__ void finish() {
    raise_on_device(params_.of<typename Input::Kernel>().flags.template flat<uint32_t>(), flags_);
  }

 private:
  // Elements 0 .. n - 1 of x and e become elements at .. at + n - 1 of c. Indices of registers are
  // constants.
  __device__ void place(const Quad<float>& x, const Quad<float>& e, uint32_t at, uint32_t n,
                        Quad<float>* c) {
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      if (k >= n) continue;
      const float in = guard_finite(x.v[k], &flags_);
      const float value = old_ != nullptr ? in + e.v[k] : in;
#pragma unroll
      for (uint32_t slot = 0; slot < kQuad; ++slot)
        c->v[slot] = slot == at + k ? value : c->v[slot];
    }
  }
  __device__ void write_half(uint64_t flat, uint32_t present, const Quad<float>& c) {
    auto* out = reinterpret_cast<uint16_t*>(payload_) + (flat - input_.base);
    Quad<uint16_t> codes;
    Quad<float> left;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      codes.v[k] = guarded_half_code(args_.kind, c.v[k], &flags_);
      left.v[k] = c.v[k] - half_value(args_.kind, codes.v[k]);
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
    const PayloadUnit unit = payload_unit(args_.kind, args_.block);
    uint8_t* out = payload_ + unit.bytes_of(flat - input_.base);
    const auto inside = static_cast<uint32_t>(flat % args_.block);
    uint32_t raised = 0;
    const QuantScale s = quant_scale(args_.kind, max_bits, &raised);
    Quad<float> left;
    float numbers[kQuad];
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) {
      numbers[k] = quant_round(s, c.v[k]);
      left.v[k] = c.v[k] - numbers[k] * s.scale;
    }
    const uint32_t per_byte = 8 / codec_bits(args_.kind);
    if (per_byte == 1) {
      Quad<uint8_t> bytes;
#pragma unroll
      for (uint32_t k = 0; k < kQuad; ++k) bytes.v[k] = packed_codes(args_.kind, numbers + k);
      store_quad(out + inside, kQuad, bytes);
    } else {
      for (uint32_t k = 0; k < kQuad; k += per_byte)
        out[(inside + k) / per_byte] = packed_codes(args_.kind, numbers + k);
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

template <class Input>
__global__ void __launch_bounds__(kThreads) quant_encode(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  // Of every block that the threads have in one round; rounds do not share.
  constexpr uint32_t kBlocksPerRound = kThreads * kQuad / kMinQuantBlock;
  __shared__ uint32_t largest[kQuadsPerThread * kBlocksPerRound];
  static_assert(kQuadsPerThread * kBlocksPerRound == kThreads);
  largest[threadIdx.x] = 0;
  __syncthreads();
  const auto& args = params.arguments<QuantArgs>();
  const bool blocks = codec_has_blocks(args.kind);
  QuantEncoder<Input> encoder(params);
  const Work work = params.work[blockIdx.x];
  const Run last = params.runs[work.first_run + work.runs - 1];
  const uint32_t end = last.position + last.count;
  for (uint32_t i = 0; i < kQuadsPerThread && i * kThreads * kQuad < end; ++i) {
    const uint32_t in_round = threadIdx.x * kQuad;
    const uint32_t position = i * kThreads * kQuad + in_round;
    Quad<float> c;
    const uint32_t present = encoder.values(work, position, &c);
    uint32_t max_bits = 0;
    if (blocks) {
      uint32_t* shared = &largest[i * kBlocksPerRound + in_round / args.block];
#pragma unroll
      for (uint32_t k = 0; k < kQuad; ++k) {
        const uint32_t bits = magnitude_bits(c.v[k]);
        max_bits = bits > max_bits ? bits : max_bits;
      }
      atomicMax(shared, max_bits);
      __syncthreads();
      max_bits = *shared;
    }
    encoder.write(work.block * kNormBlock + position, present, c, max_bits);
  }
  encoder.finish();
}

}  // namespace sotto::cuda
