// Ops of 0/1 Adam.
#pragma once

#include "core/cpu/elements.h"
#include "core/cpu/ops.h"
#include "core/cpu/ops_adam.h"
#include "core/kernels/zeroone.h"

namespace sotto {

struct FrozenAdamOp : OpBase {
  explicit FrozenAdamOp(const KernelCall& call)
      : FrozenAdamOp(call, call.of<kernels::FrozenAdam>()) {}
  FrozenAdamOp(const KernelCall& call, const kernels::FrozenAdamOperands<Operand>& o)
      : gradients{{&o.g, call.arguments<SourceArgs>().source},
                  o.clip.flat<const float>(),
                  o.valid.flat<const uint8_t>()},
        mean{nullptr, o.bits.flat<const uint8_t>(), o.messages.flat<const uint8_t>()},
        m(o.m.flat<float>()),
        v(o.v.flat<const float>()),
        parameters(&o.p),
        groups(o.scalars.flat<const ZeroOneGroupScalars>()) {}

  Floats source(const Piece& p) const { return gradients.source.of(p); }
  float* parameter(const Piece& p) const { return parameters->list<float>(p.tensor) + p.offset; }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const ZeroOneGroupScalars& s = groups[piece.group];
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
  const ZeroOneGroupScalars* groups;
};

struct ZeroOneLocalOp : OpBase {
  explicit ZeroOneLocalOp(const KernelCall& call)
      : ZeroOneLocalOp(call, call.of<kernels::ZeroOneLocal>()) {}
  ZeroOneLocalOp(const KernelCall& call, const kernels::ZeroOneLocalOperands<Operand>& o)
      : gradients{{&o.g, call.arguments<SourceArgs>().source},
                  o.clip.flat<const float>(),
                  o.valid.flat<const uint8_t>()},
        m(o.m.flat<float>()),
        b(o.b.flat<float>()),
        den(o.den.flat<const float>()),
        anchor(o.anchor.flat<const float>()),
        parameters(&o.p),
        groups(o.scalars.flat<const ZeroOneGroupScalars>()) {}

  Floats source(const Piece& p) const { return gradients.source.of(p); }
  float* parameter(const Piece& p) const { return parameters->list<float>(p.tensor) + p.offset; }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const ZeroOneGroupScalars& s = groups[piece.group];
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
  const ZeroOneGroupScalars* groups;
};

// What the encoder of a synchronisation and its undo read.
struct ZeroOneEncodeOp : OpBase {
  explicit ZeroOneEncodeOp(const KernelCall& call)
      : ZeroOneEncodeOp(call, call.of<kernels::ZeroOneEncode>()) {}
  ZeroOneEncodeOp(const KernelCall& call, const kernels::ZeroOneEncodeOperands<Operand>& o)
      : args(call.arguments<EncodeArgs>()),
        gradients{
            {&o.g, args.source}, o.clip.flat<const float>(), o.to.valid.flat<const uint8_t>()},
        m(o.m.flat<const float>()),
        b(o.b.flat<const float>()),
        c(o.to.c.flat<float>()),
        old_scales(o.to.old_scales.flat<const float>()),
        bits(o.to.bits.flat<uint8_t>()),
        flags_out(o.to.flags.flat<uint32_t>()),
        groups(o.scalars.flat<const ZeroOneGroupScalars>()),
        sums(o.to.sums.flat<float>()) {}

  Floats source(const Piece& p) const { return gradients.source.of(p); }
  // x of element j of a piece.
  float input(const Piece& p, uint64_t j) const {
    const ZeroOneGroupScalars& s = groups[p.group];
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
  const ZeroOneGroupScalars* groups;
  NormBlocks sums;
  float* lanes = nullptr;
  uint32_t flags = 0;
};

struct ZeroOneSyncOp : OpBase {
  explicit ZeroOneSyncOp(const KernelCall& call)
      : ZeroOneSyncOp(call, call.of<kernels::ZeroOneSync>()) {}
  ZeroOneSyncOp(const KernelCall&, const kernels::ZeroOneSyncOperands<Operand>& o)
      : mean{o.x.floats.flat<const float>(), o.x.bits.flat<const uint8_t>(),
             o.x.messages.flat<const uint8_t>()},
        m(o.m.flat<float>()),
        b(o.b.flat<float>()),
        den(o.den.flat<const float>()),
        anchor(o.anchor.flat<float>()),
        parameters(&o.p),
        groups(o.scalars.flat<const ZeroOneGroupScalars>()),
        valid(o.valid.flat<const uint8_t>()) {}

  float* parameter(const Piece& p) const { return parameters->list<float>(p.tensor) + p.offset; }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const ZeroOneGroupScalars& s = groups[piece.group];
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
  const ZeroOneGroupScalars* groups;
  const uint8_t* valid;
};

}  // namespace sotto
