// Ops of Adam, LAMB and norms of gradients.
#pragma once

#include <type_traits>

#include "core/cpu/elements.h"
#include "core/cpu/ops.h"
#include "core/cpu/ops_state.h"
#include "core/kernels/adam.h"
#include "core/kernels/lamb.h"

namespace sotto {

struct SumSquaresOp : OpBase {
  explicit SumSquaresOp(const KernelCall& call)
      : SumSquaresOp(call, call.of<kernels::SumSquares>()) {}
  SumSquaresOp(const KernelCall& call, const kernels::SumSquaresOperands<Operand>& o)
      : input{&o.x, call.arguments<SourceArgs>().source}, sums(o.sums.flat<float>()) {}

  Floats source(const Piece& p) const { return input.of(p); }
  void open(uint64_t block) { lanes = sums.open(block); }
  void elements(const Piece& p, uint64_t first, uint64_t count) {
    const Floats x = source(p);
    for (uint64_t j = first; j < first + count; ++j) {
      lanes[(p.lane + j) % kNormLanes] += x[j] * x[j];
    }
  }
  void finish() { sums.finish(); }

  Source input;
  NormBlocks sums;
  float* lanes = nullptr;
};

// A gradient as the optimizers see it: clipped, 0 where masked.
struct Gradients {
  Source source;
  const float* clip;
  const uint8_t* valid;

  bool masked(uint64_t flat) const { return valid != nullptr && !get_bit(valid, flat); }
  float at(const Floats& g, uint64_t j, uint64_t flat) const {
    if (masked(flat)) return 0.0f;
    return clip != nullptr ? g[j] * *clip : g[j];
  }
};

// The type of the gradients in a call with this kind of state; Args: where it is float32.
template <class State, class Args>
Dtype source_of(const KernelCall& call) {
  if constexpr (State::kLowPrecision) return call.arguments<LowPrecisionArgs>().source;
  return call.arguments<Args>().source;
}

template <class State>
struct AdamOp : OpBase {
  using Kernel = std::conditional_t<State::kLowPrecision, kernels::AdamLowPrecision, kernels::Adam>;

  explicit AdamOp(const KernelCall& call) : AdamOp(call, shared(call)) {}
  AdamOp(const KernelCall& call, const kernels::AdamOperands<Operand>& o)
      : gradients{{&o.g, source_of<State, SourceArgs>(call)},
                  o.clip.flat<const float>(),
                  o.valid.flat<const uint8_t>()},
        state(operands(call)),
        parameters(&o.p),
        groups(o.scalars.flat<const AdamGroupScalars>()) {}

  Floats source(const Piece& p) const { return gradients.source.of(p); }
  float* parameter(const Piece& p) const { return parameters->list<float>(p.tensor) + p.offset; }
  void open(uint64_t block) { state.open(block); }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const AdamGroupScalars& s = groups[piece.group];
    const float lr = static_cast<float>(s.lr);
    const Floats g = source(piece);
    float* p = parameter(piece);
    for (const uint64_t end = first + count; first != end;) {
      const uint64_t stop = first + state.begin(piece, first, end - first);
      for (; first != stop; ++first) {
        const uint64_t flat = piece.flat + first;
        Moments moments{state.old_m(flat), state.old_v(flat)};
        adam_element(s, lr, gradients.at(g, first, flat), &moments, &p[first]);
        state.keep(moments, flat, position_in_block(piece, first));
      }
    }
  }
  void finish() { state.finish(); }

  Gradients gradients;
  State state;
  const Operand* parameters;
  const AdamGroupScalars* groups;

 private:
  static const kernels::AdamOperands<Operand>& shared(const KernelCall& call) {
    if constexpr (State::kLowPrecision) {
      return call.of<Kernel>().adam;
    } else {
      return call.of<Kernel>();
    }
  }
  static StateOperands operands(const KernelCall& call) {
    StateOperands at{shared(call).m.data, shared(call).v.data};
    if constexpr (State::kLowPrecision) {
      const auto& o = call.of<Kernel>();
      at.step = o.step.template flat<const uint64_t>();
      at.m_exponents = o.m_exponents.template flat<uint8_t>();
      at.v_exponents = o.v_exponents.template flat<uint8_t>();
    }
    return at;
  }
};

struct LambMomentsOp : OpBase {
  explicit LambMomentsOp(const KernelCall& call)
      : LambMomentsOp(call, call.of<kernels::LambMoments>()) {}
  LambMomentsOp(const KernelCall& call, const kernels::LambMomentsOperands<Operand>& o)
      : gradients{{&o.g, call.arguments<SourceArgs>().source},
                  o.clip.flat<const float>(),
                  o.valid.flat<const uint8_t>()},
        m(o.m.flat<float>()),
        v(o.v.flat<float>()),
        parameters(&o.p),
        groups(o.scalars.flat<const LambGroupScalars>()),
        directions(&o.u),
        p_sums(o.p_sums.flat<float>()),
        u_sums(o.u_sums.flat<float>()) {}

  Floats source(const Piece& p) const { return gradients.source.of(p); }
  const float* parameter(const Piece& p) const {
    return parameters->list<const float>(p.tensor) + p.offset;
  }
  // u; may be the memory of a float32 gradient.
  float* direction(const Piece& p) const { return directions->list<float>(p.tensor) + p.offset; }
  void open(uint64_t block) {
    p_lanes = p_sums.open(block);
    u_lanes = u_sums.open(block);
  }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const LambGroupScalars& s = groups[piece.group];
    const Floats g = source(piece);
    const float* p = parameter(piece);
    float* out = direction(piece);
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = piece.flat + j;
      const Moments next = adam_moments(s, m[flat], v[flat], gradients.at(g, j, flat));
      m[flat] = next.m;
      v[flat] = next.v;
      const float u = lamb_direction(s, next.m, next.v, p[j]);
      out[j] = u;
      const uint64_t lane = (piece.lane + j) % kNormLanes;
      p_lanes[lane] += p[j] * p[j];
      u_lanes[lane] += u * u;
    }
  }
  void finish() {
    p_sums.finish();
    u_sums.finish();
  }

  Gradients gradients;
  float* m;
  float* v;
  const Operand* parameters;
  const LambGroupScalars* groups;
  const Operand* directions;
  NormBlocks p_sums, u_sums;
  float* p_lanes = nullptr;
  float* u_lanes = nullptr;
};

struct LambUpdateOp : OpBase {
  explicit LambUpdateOp(const KernelCall& call)
      : LambUpdateOp(call, call.of<kernels::LambUpdate>()) {}
  LambUpdateOp(const KernelCall&, const kernels::LambUpdateOperands<Operand>& o)
      : directions(&o.u), parameters(&o.p), steps(o.steps.flat<const TensorStep>()) {}

  const float* direction(const Piece& p) const {
    return directions->list<const float>(p.tensor) + p.offset;
  }
  float* parameter(const Piece& p) const { return parameters->list<float>(p.tensor) + p.offset; }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const float step = steps[piece.tensor].step_size;
    const float* u = direction(piece);
    float* p = parameter(piece);
    for (uint64_t j = first; j < first + count; ++j) p[j] = p[j] - step * u[j];
  }

  const Operand* directions;
  const Operand* parameters;
  const TensorStep* steps;
};

}  // namespace sotto
