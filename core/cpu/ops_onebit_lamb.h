// Ops of 1-bit LAMB.
#pragma once

#include "core/cpu/elements.h"
#include "core/cpu/ops.h"
#include "core/kernels/onebit_lamb.h"

namespace sotto {

// What the encoder and its undo read.
struct OnebitLambEncodeOp : OpBase {
  explicit OnebitLambEncodeOp(const KernelCall& call)
      : OnebitLambEncodeOp(call, call.of<kernels::OnebitLambEncode>()) {}
  OnebitLambEncodeOp(const KernelCall& call, const kernels::OnebitLambEncodeOperands<Operand>& o)
      : args(call.arguments<EncodeArgs>()),
        gradients{&o.g, args.source},
        momentum{o.m.floats.flat<const float>(), o.m.bits.flat<const uint8_t>(),
                 o.m.messages.flat<const uint8_t>()},
        c(o.to.c.flat<float>()),
        old_scales(o.to.old_scales.flat<const float>()),
        bits(o.to.bits.flat<uint8_t>()),
        valid(o.to.valid.flat<const uint8_t>()),
        flags_out(o.to.flags.flat<uint32_t>()),
        groups(o.scalars.flat<const GroupScalars>()),
        states(o.states.flat<const TensorState>()),
        clip(o.clip.flat<const float>()),
        sums(o.to.sums.flat<float>()) {}

  bool masked(uint64_t flat) const { return valid != nullptr && !get_bit(valid, flat); }
  Floats source(const Piece& p) const { return gradients.of(p); }
  // x of element j of a piece; not for masked elements.
  float input(const Piece& p, uint64_t j, float scaling, float magnitude) const {
    const float g = source(p)[j];
    return onebit_lamb_input(groups[p.group], momentum.at(p.flat + j, magnitude),
                             clip != nullptr ? g * *clip : g, scaling);
  }
  void open(uint64_t block) { lanes = sums.open(block); }
  void pad(const Piece& p, uint64_t first, uint64_t count) {
    set_bits(bits, p.flat + first - args.bits_base, count);
  }
  void elements(const Piece& p, uint64_t first, uint64_t count) {
    const float scaling = scaling_of(states, p);
    const float magnitude = momentum.magnitude(p, scaling);
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = p.flat + j;
      float value = 0.0f;
      if (!masked(flat)) {
        value = encode_value(input(p, j, scaling, magnitude), c[flat], old_scales[p.scale], &flags);
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
  Source gradients;
  Momentum momentum;
  float* c;
  const float* old_scales;
  uint8_t* bits;
  const uint8_t* valid;
  uint32_t* flags_out;
  const GroupScalars* groups;
  const TensorState* states;
  const float* clip;
  NormBlocks sums;
  float* lanes = nullptr;
  uint32_t flags = 0;
};

struct FreezeVarianceOp : OpBase {
  explicit FreezeVarianceOp(const KernelCall& call)
      : FreezeVarianceOp(call, call.of<kernels::FreezeVariance>()) {}
  FreezeVarianceOp(const KernelCall& call, const kernels::FreezeVarianceOperands<Operand>& o)
      : mask_zero(call.arguments<FreezeArgs>().mask_zero_variance),
        m(o.m.flat<const float>()),
        v(o.v.flat<const float>()),
        vf(o.vf.flat<float>()),
        den(o.den.flat<float>()),
        valid(o.valid.flat<uint8_t>()),
        groups(o.scalars.flat<const GroupScalars>()),
        sums(o.sums.flat<float>()) {}

  void open(uint64_t block) { lanes = sums.open(block); }
  void elements(const Piece& p, uint64_t first, uint64_t count) {
    const GroupScalars& s = groups[p.group];
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = p.flat + j;
      if (vf != nullptr) vf[flat] = v[flat];
      if (den != nullptr) den[flat] = denominator(s, v[flat]);
      // Tensors start at any bit, so threads of one call may share a byte.
      if (valid != nullptr && mask_zero && v[flat] == 0.0f) clear_bit_shared(valid, flat);
      if (m != nullptr && (valid == nullptr || get_bit_shared(valid, flat))) {
        lanes[(p.lane + j) % kNormLanes] += m[flat] * m[flat];
      }
    }
  }
  void finish() { sums.finish(); }

  const bool mask_zero;
  const float* m;
  const float* v;
  float* vf;
  float* den;
  uint8_t* valid;
  const GroupScalars* groups;
  NormBlocks sums;
  float* lanes = nullptr;
};

// Pass A.
struct FactorOp : OpBase {
  explicit FactorOp(const KernelCall& call)
      : FactorOp(call, call.of<kernels::OnebitLambFactor>()) {}
  FactorOp(const KernelCall&, const kernels::OnebitLambFactorOperands<Operand>& o)
      : fresh{o.m.floats.flat<const float>(), o.m.bits.flat<const uint8_t>(),
              o.m.messages.flat<const uint8_t>()},
        old{o.old.floats.flat<const float>(), o.old.bits.flat<const uint8_t>(),
            o.old.messages.flat<const uint8_t>()},
        vf(o.vf.flat<float>()),
        den(o.den.flat<const float>()),
        parameters(&o.p),
        valid(o.valid.flat<const uint8_t>()),
        groups(o.scalars.flat<const GroupScalars>()),
        states(o.states.flat<const TensorState>()),
        u0_sums(o.u0_sums.flat<float>()),
        u_sums(o.u_sums.flat<float>()),
        maxima(o.maxima.flat<float>()) {}

  const float* parameter(const Piece& p) const {
    return parameters->list<const float>(p.tensor) + p.offset;
  }
  void open(uint64_t block) {
    u0_lanes = u0_sums.open(block);
    u_lanes = u_sums.open(block);
    best = maxima.open(block);
  }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const GroupScalars& s = groups[piece.group];
    const float scaling = scaling_of(states, piece);
    const float new_magnitude = fresh.magnitude(piece, scaling);
    const float old_magnitude = old.magnitude(piece, scaling);
    const float* p = parameter(piece);
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = piece.flat + j;
      float u0 = 0.0f;
      if (valid == nullptr || get_bit(valid, flat)) {
        const float m = fresh.at(flat, new_magnitude);
        vf[flat] = fresh_variance(s, m, old.at(flat, old_magnitude), vf[flat]);
        const float ratio = den[flat] / denominator(s, vf[flat]);
        if (ratio > *best) *best = ratio;
        u0 = m / den[flat];
      }
      if (s.weight_decay == 0.0f) continue;
      const float u = with_decay(s, u0, p[j]);
      u0_lanes[(piece.lane + j) % kNormLanes] += u0 * u0;
      u_lanes[(piece.lane + j) % kNormLanes] += u * u;
    }
  }
  void finish() {
    u0_sums.finish();
    u_sums.finish();
    maxima.finish();
  }

  Momentum fresh, old;
  float* vf;
  const float* den;
  const Operand* parameters;
  const uint8_t* valid;
  const GroupScalars* groups;
  const TensorState* states;
  NormBlocks u0_sums, u_sums;
  BlockMaxima maxima;
  float* u0_lanes = nullptr;
  float* u_lanes = nullptr;
  float* best = nullptr;
};

// Pass B.
struct MomentumUpdateOp : OpBase {
  explicit MomentumUpdateOp(const KernelCall& call)
      : MomentumUpdateOp(call, call.of<kernels::MomentumUpdate>()) {}
  MomentumUpdateOp(const KernelCall&, const kernels::MomentumUpdateOperands<Operand>& o)
      : momentum{o.m.floats.flat<const float>(), o.m.bits.flat<const uint8_t>(),
                 o.m.messages.flat<const uint8_t>()},
        den(o.den.flat<const float>()),
        parameters(&o.p),
        valid(o.valid.flat<const uint8_t>()),
        groups(o.scalars.flat<const GroupScalars>()),
        steps(o.steps.flat<const TensorStep>()),
        states(o.states.flat<const TensorState>()) {}

  float* parameter(const Piece& p) const { return parameters->list<float>(p.tensor) + p.offset; }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const GroupScalars& s = groups[piece.group];
    const float step = steps[piece.tensor].step_size;
    const float magnitude = momentum.magnitude(piece, scaling_of(states, piece));
    float* p = parameter(piece);
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = piece.flat + j;
      const bool masked = valid != nullptr && !get_bit(valid, flat);
      const float u0 = masked ? 0.0f : momentum.at(flat, magnitude) / den[flat];
      p[j] = p[j] - step * with_decay(s, u0, p[j]);
    }
  }

  Momentum momentum;
  const float* den;
  const Operand* parameters;
  const uint8_t* valid;
  const GroupScalars* groups;
  const TensorStep* steps;
  const TensorState* states;
};

}  // namespace sotto
