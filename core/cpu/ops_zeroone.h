// Ops of 0/1 Adam.
#pragma once

#include "core/cpu/elements.h"
#include "core/cpu/ops.h"
#include "core/cpu/ops_adam.h"

namespace sotto {

struct FrozenAdamOp : OpBase {
  explicit FrozenAdamOp(const KernelCall& call)
      : gradients{{&call.operands[0], call.arguments<SourceArgs>().source},
                  call.operands[7].flat<const float>(),
                  call.operands[8].flat<const uint8_t>()},
        mean{nullptr, call.operands[1].flat<const uint8_t>(),
             call.operands[2].flat<const uint8_t>()},
        m(call.operands[3].flat<float>()),
        v(call.operands[4].flat<const float>()),
        parameters(&call.operands[5]),
        groups(call.operands[6].flat<const GroupScalars>()) {}

  Floats source(const Piece& p) const { return gradients.source.of(p); }
  float* parameter(const Piece& p) const { return parameters->list<float>(p.tensor) + p.offset; }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const GroupScalars& s = groups[piece.group];
    const float lr = static_cast<float>(s.lr);
    const float magnitude = mean.magnitude(piece, 1.0f);
    const Floats g = mean.bits != nullptr ? Floats{} : source(piece);
    float* p = parameter(piece);
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = piece.flat + j;
      float gradient = 0.0f;
      if (mean.bits == nullptr) {
        gradient = gradients.at(g, j, flat);
      } else if (!gradients.masked(flat)) {
        gradient = mean.at(flat, magnitude);
      }
      frozen_adam_element(s, lr, gradient, &m[flat], v[flat], &p[j]);
    }
  }

  Gradients gradients;
  Momentum mean;  // the averaged gradient as bits
  float* m;
  const float* v;
  const Operand* parameters;
  const GroupScalars* groups;
};

struct ZeroOneLocalOp : OpBase {
  explicit ZeroOneLocalOp(const KernelCall& call)
      : gradients{{&call.operands[0], call.arguments<SourceArgs>().source},
                  call.operands[7].flat<const float>(),
                  call.operands[8].flat<const uint8_t>()},
        m(call.operands[1].flat<float>()),
        b(call.operands[2].flat<float>()),
        den(call.operands[3].flat<const float>()),
        anchor(call.operands[4].flat<const float>()),
        parameters(&call.operands[5]),
        groups(call.operands[6].flat<const GroupScalars>()) {}

  Floats source(const Piece& p) const { return gradients.source.of(p); }
  float* parameter(const Piece& p) const { return parameters->list<float>(p.tensor) + p.offset; }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const GroupScalars& s = groups[piece.group];
    const float lr = static_cast<float>(s.lr);
    const Floats g = source(piece);
    float* p = parameter(piece);
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = piece.flat + j;
      zeroone_local_element(s, lr, gradients.masked(flat), gradients.at(g, j, flat), &m[flat],
                            &b[flat], den[flat], anchor[flat], &p[j]);
    }
  }

  Gradients gradients;
  float* m;
  float* b;
  const float* den;
  const float* anchor;
  const Operand* parameters;
  const GroupScalars* groups;
};

// What the encoder of a synchronisation and its undo read.
struct ZeroOneEncodeOp : OpBase {
  explicit ZeroOneEncodeOp(const KernelCall& call)
      : args(call.arguments<EncodeArgs>()),
        gradients{{&call.operands[0], args.source},
                  call.operands[10].flat<const float>(),
                  call.operands[7].flat<const uint8_t>()},
        m(call.operands[1].flat<const float>()),
        b(call.operands[2].flat<const float>()),
        c(call.operands[3].flat<float>()),
        old_scales(call.operands[4].flat<const float>()),
        bits(call.operands[5].flat<uint8_t>()),
        flags_out(call.operands[8].flat<uint32_t>()),
        groups(call.operands[9].flat<const GroupScalars>()),
        sums(call.operands[6].flat<float>()) {}

  Floats source(const Piece& p) const { return gradients.source.of(p); }
  // x of element j of a piece.
  float input(const Piece& p, uint64_t j) const {
    const GroupScalars& s = groups[p.group];
    const uint64_t flat = p.flat + j;
    if (gradients.source.operand->data == nullptr) return b[flat];
    return zeroone_encode_input(s, m[flat], b[flat], gradients.at(source(p), j, flat));
  }
  void open(uint64_t block) { lanes = sums.open(block); }
  void pad(const Piece& p, uint64_t first, uint64_t count) {
    set_bits(bits, p.flat + first - args.bits_base, count);
  }
  void elements(const Piece& p, uint64_t first, uint64_t count) {
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = p.flat + j;
      float value = 0.0f;
      if (!gradients.masked(flat)) {
        value = encode_value(input(p, j), c[flat], old_scales[p.scale], &flags);
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
  Gradients gradients;
  const float* m;
  const float* b;
  float* c;
  const float* old_scales;
  uint8_t* bits;
  uint32_t* flags_out;
  const GroupScalars* groups;
  NormBlocks sums;
  float* lanes = nullptr;
  uint32_t flags = 0;
};

struct ZeroOneSyncOp : OpBase {
  explicit ZeroOneSyncOp(const KernelCall& call)
      : mean{call.operands[0].flat<const float>(), call.operands[1].flat<const uint8_t>(),
             call.operands[2].flat<const uint8_t>()},
        m(call.operands[3].flat<float>()),
        b(call.operands[4].flat<float>()),
        den(call.operands[5].flat<const float>()),
        anchor(call.operands[6].flat<float>()),
        parameters(&call.operands[7]),
        groups(call.operands[8].flat<const GroupScalars>()),
        valid(call.operands[9].flat<const uint8_t>()) {}

  float* parameter(const Piece& p) const { return parameters->list<float>(p.tensor) + p.offset; }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const GroupScalars& s = groups[piece.group];
    const float magnitude = mean.magnitude(piece, 1.0f);
    float* p = parameter(piece);
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = piece.flat + j;
      const bool masked = valid != nullptr && !get_bit(valid, flat);
      zeroone_sync_element(s, masked, mean.at(flat, magnitude), &m[flat], &b[flat], den[flat],
                           &anchor[flat], &p[j]);
    }
  }

  Momentum mean;  // what was averaged
  float* m;
  float* b;
  const float* den;
  float* anchor;
  const Operand* parameters;
  const GroupScalars* groups;
  const uint8_t* valid;
};

}  // namespace sotto
