// Ops of the 1-bit codec.
#pragma once

#include "core/cpu/elements.h"
#include "core/cpu/ops.h"

namespace sotto {

struct EncodeOp : OpBase {
  explicit EncodeOp(const KernelCall& call)
      : args(call.arguments<EncodeArgs>()),
        input{&call.operands[0], args.source},
        c(call.operands[1].flat<float>()),
        old_scales(call.operands[2].flat<const float>()),
        bits(call.operands[3].flat<uint8_t>()),
        valid(call.operands[5].flat<const uint8_t>()),
        flags_out(call.operands[6].flat<uint32_t>()),
        coefficient(call.operands[7].flat<const float>()),
        sums(call.operands[4].flat<float>()) {}

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
  explicit ServerOp(const KernelCall& call)
      : args(call.arguments<ServerArgs>()),
        part(1.0f / static_cast<float>(args.world)),
        rows(call.operands[0].flat<const uint8_t>()),
        messages(call.operands[1].flat<const uint8_t>()),
        c(call.operands[2].flat<const float>()),
        old_scales(call.operands[3].flat<const float>()),
        bits(call.operands[4].flat<uint8_t>()),
        valid(call.operands[6].flat<const uint8_t>()),
        new_c(call.operands[7].flat<float>()),
        sums(call.operands[5].flat<float>()) {}

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
  explicit DecodeOp(const KernelCall& call)
      : bits(call.operands[0].flat<const uint8_t>()),
        messages(call.operands[1].flat<const uint8_t>()),
        outputs(&call.operands[2]),
        valid(call.operands[3].flat<const uint8_t>()) {}

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
