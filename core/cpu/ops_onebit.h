// Ops of the 1-bit codec.
#pragma once

#include "core/cpu/elements.h"
#include "core/cpu/ops.h"
#include "core/kernels/onebit.h"

namespace sotto {

struct EncodeOp : OpBase {
  explicit EncodeOp(const KernelCall& call) : EncodeOp(call, call.of<kernels::OnebitEncode>()) {}
  EncodeOp(const KernelCall& call, const kernels::OnebitEncodeOperands<Operand>& o)
      : args(call.arguments<EncodeArgs>()),
        input{&o.x, args.source},
        c(o.to.c.flat<float>()),
        old_scales(o.to.old_scales.flat<const float>()),
        bits(o.to.bits.flat<uint8_t>()),
        valid(o.to.valid.flat<const uint8_t>()),
        flags_out(o.to.flags.flat<uint32_t>()),
        coefficient(o.coefficient.flat<const float>()),
        sums(o.to.sums.flat<float>()) {}

  float factor() const { return coefficient != nullptr ? *coefficient : 1.0f; }
  Floats source(const Piece& p) const { return input.of(p); }
  void open(uint64_t block) { lanes = sums.open(block); }
  void pad(const Piece& p, uint64_t first, uint64_t count) {
    set_bits(bits, p.flat + first - args.bits_base, count);
  }
  void elements(const Piece& p, uint64_t first, uint64_t count) {
    const Floats x = source(p);
    const float by = factor();  // a product with 1 is exact
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = p.flat + j;
      float value = 0.0f;
      if (valid == nullptr || get_bit(valid, flat)) {
        value = encode_value(x[j] * by, c[flat], old_scales[p.scale], &flags);
        lanes[(p.lane + j) % kNormLanes] += norm_term(args.scale, value);
      }
      c[flat] = value;
      set_bit(bits, flat - args.bits_base, value >= 0.0f);
    }
  }
  void finish() {
    sums.finish();
    raise_flags(flags_out, flags);
  }

  const EncodeArgs& args;
  Source input;
  float* c;
  const float* old_scales;
  uint8_t* bits;
  const uint8_t* valid;
  uint32_t* flags_out;
  const float* coefficient;
  NormBlocks sums;
  float* lanes = nullptr;
  uint32_t flags = 0;
};

struct ServerOp : OpBase {
  explicit ServerOp(const KernelCall& call) : ServerOp(call, call.of<kernels::OnebitServer>()) {}
  ServerOp(const KernelCall& call, const kernels::OnebitServerOperands<Operand>& o)
      : args(call.arguments<ServerArgs>()),
        part(1.0f / static_cast<float>(args.world)),
        rows(o.rows.flat<const uint8_t>()),
        messages(o.messages.flat<const uint8_t>()),
        c(o.c.flat<const float>()),
        old_scales(o.old_scales.flat<const float>()),
        bits(o.bits.flat<uint8_t>()),
        valid(o.valid.flat<const uint8_t>()),
        new_c(o.new_c.flat<float>()),
        sums(o.sums.flat<float>()) {}

  // What a bit of rank r counts: fl(S_r * fl(1/W)).
  float term(uint32_t r, const Piece& p) const {
    return message_scale(messages, r * (args.instances + 1) + p.message) * part;
  }
  float sum(const Piece& p, uint64_t flat) const {
    return sum_of_ranks(args.world, [&](uint32_t r) {
      return plus_minus(get_bit(rows + r * args.row_bytes, flat), term(r, p));
    });
  }
  void open(uint64_t block) { lanes = sums.open(block); }
  void pad(const Piece& p, uint64_t first, uint64_t count) {
    set_bits(bits, p.flat + first, count);
  }
  void elements(const Piece& p, uint64_t first, uint64_t count) {
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = p.flat + j;
      float value = 0.0f;
      if (valid == nullptr || get_bit(valid, flat + args.valid_base)) {
        value = sum(p, flat) + residual_of(c[flat], old_scales[p.scale]);
        lanes[(p.lane + j) % kNormLanes] += norm_term(args.scale, value);
      }
      new_c[flat] = value;
      set_bit(bits, flat, value >= 0.0f);
    }
  }
  void finish() { sums.finish(); }

  const ServerArgs& args;
  const float part;
  const uint8_t* rows;
  const uint8_t* messages;
  const float* c;
  const float* old_scales;
  uint8_t* bits;
  const uint8_t* valid;
  float* new_c;
  NormBlocks sums;
  float* lanes = nullptr;
};

struct DecodeOp : OpBase {
  explicit DecodeOp(const KernelCall& call) : DecodeOp(call, call.of<kernels::OnebitDecode>()) {}
  DecodeOp(const KernelCall&, const kernels::OnebitDecodeOperands<Operand>& o)
      : bits(o.bits.flat<const uint8_t>()),
        messages(o.messages.flat<const uint8_t>()),
        outputs(&o.y),
        valid(o.valid.flat<const uint8_t>()) {}

  float scale(const Piece& p) const { return message_scale(messages, p.message); }
  float* output(const Piece& p) const { return outputs->list<float>(p.tensor) + p.target; }
  void elements(const Piece& p, uint64_t first, uint64_t count) {
    const float magnitude = scale(p);
    float* y = output(p);
    for (uint64_t j = first; j < first + count; ++j) {
      const bool masked = valid != nullptr && !get_bit(valid, p.flat + j);
      y[j] = masked ? 0.0f : plus_minus(get_bit(bits, p.flat + j), magnitude);
    }
  }

  const uint8_t* bits;
  const uint8_t* messages;
  const Operand* outputs;
  const uint8_t* valid;
};

}  // namespace sotto
