// Ops of outer optimizers.
#pragma once

#include "core/cpu/elements.h"
#include "core/cpu/ops.h"
#include "core/kernels/outer_elements.h"

namespace sotto {

inline OuterVotes count_outer_votes(const OuterMessage* messages, uint32_t world) {
  OuterVotes votes;
  for (uint32_t r = 0; r < world; ++r) {
    votes.ranks += messages[r].weight != 0;
    votes.flagged |= messages[r].flags != 0;
  }
  return votes;
}

struct OuterDeltaOp : OpBase {
  explicit OuterDeltaOp(const KernelCall& call)
      : OuterDeltaOp(call, call.of<kernels::OuterDelta>()) {}
  OuterDeltaOp(const KernelCall& call, const kernels::OuterDeltaOperands<Operand>& o)
      : params(call.arguments<OuterDeltaArgs>().params),
        tensors(&o.x),
        anchor(o.anchor.flat<const float>()),
        y(o.y.flat<float>()),
        flags_out(o.flags.flat<uint32_t>()),
        sums(o.sums.flat<float>()) {}

  const float* live(const Piece& p) const {
    return tensors->list<const float>(p.tensor) + p.offset;
  }
  void open(uint64_t block) { lanes = sums.open(block); }
  void elements(const Piece& p, uint64_t first, uint64_t count) {
    const float* x = live(p);
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = p.flat + j;
      const float d = anchor[flat] - x[j];
      lanes[(p.lane + j) % kNormLanes] += d * d;
      if (y == nullptr) continue;
      y[flat] = params ? x[j] : d;
      if (!is_finite(y[flat])) flags |= kFlagNonfinite;
    }
  }
  void finish() {
    sums.finish();
    raise_flags(flags_out, flags);
  }

  const bool params;
  const Operand* tensors;
  const float* anchor;
  float* y;
  uint32_t* flags_out;
  NormBlocks sums;
  float* lanes = nullptr;
  uint32_t flags = 0;
};

struct OuterNormOp : OpBase {
  explicit OuterNormOp(const KernelCall& call) : OuterNormOp(call, call.of<kernels::OuterNorm>()) {}
  OuterNormOp(const KernelCall& call, const kernels::OuterNormOperands<Operand>& o)
      : sum(o.sum.flat<const float>()),
        anchor(o.anchor.flat<const float>()),
        mean(mean_of(call.arguments<OuterNormArgs>(), o.messages.flat<const OuterMessage>())),
        sums(o.sums.flat<float>()) {}

  void open(uint64_t block) { lanes = sums.open(block); }
  void elements(const Piece& p, uint64_t first, uint64_t count) {
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = p.flat + j;
      const bool params = anchor != nullptr;
      const float u = outer_average(params, sum[flat], mean, params ? anchor[flat] : 0.0f);
      lanes[(p.lane + j) % kNormLanes] += u * u;
    }
  }
  void finish() { sums.finish(); }

  const float* sum;
  const float* anchor;
  const float mean;
  NormBlocks sums;
  float* lanes = nullptr;

 private:
  static float mean_of(const OuterNormArgs& a, const OuterMessage* messages) {
    return outer_mean(a.divided, count_outer_votes(messages, a.world).ranks);
  }
};

struct OuterStepOp : OpBase {
  explicit OuterStepOp(const KernelCall& call) : OuterStepOp(call, call.of<kernels::OuterStep>()) {}
  OuterStepOp(const KernelCall& call, const kernels::OuterStepOperands<Operand>& o)
      : args(call.arguments<OuterStepArgs>()),
        arrays(args, o),
        element(args, o.numbers.flat<const OuterNumbers>(), arrays.fresh != nullptr),
        factors(o.factors.flat<const OuterFactor>()),
        tensors(&o.x),
        moves(args.pass == OuterPass::kWhole || args.pass == OuterPass::kUpdate),
        counts(moves && o.clipped.data != nullptr),
        step_sums(moves ? o.step_sums.flat<float>() : nullptr),
        m_sums(args.pass == OuterPass::kMomentum ? o.m_sums.flat<float>() : nullptr),
        clipped(counts ? o.clipped.flat<float>() : nullptr) {}

  // Null: there is no merge.
  float* live(const Piece& p) const {
    if (tensors->data == nullptr || args.pass == OuterPass::kMomentum) return nullptr;
    return tensors->list<float>(p.tensor) + p.offset;
  }
  void open(uint64_t block) {
    step_lanes = step_sums.open(block);
    m_lanes = m_sums.open(block);
    clipped_lanes = clipped.open(block);
  }
  void elements(const Piece& piece, uint64_t first, uint64_t count) {
    const float inv_lambda = inv_lambda_of(args, factors, piece);
    float* x = live(piece);
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = piece.flat + j;
      if (args.pass != OuterPass::kMerge) advance(flat, (piece.lane + j) % kNormLanes, inv_lambda);
      if (x != nullptr) x[j] = element.merged(x[j], arrays.anchor[flat], at(arrays.x_launch, flat));
    }
  }
  void finish() {
    step_sums.finish();
    m_sums.finish();
    clipped.finish();
  }

  const OuterStepArgs& args;
  OuterArrays arrays;
  OuterElement element;
  const OuterFactor* factors;
  const Operand* tensors;
  const bool moves;   // the anchor
  const bool counts;  // what is clipped
  NormBlocks step_sums, m_sums, clipped;
  float* step_lanes = nullptr;
  float* m_lanes = nullptr;
  float* clipped_lanes = nullptr;

 private:
  static float at(const float* values, uint64_t flat) {
    return values == nullptr ? 0.0f : values[flat];
  }
  void advance(uint64_t flat, uint64_t lane, float inv_lambda) {
    const OuterSources from{at(arrays.sum, flat), at(arrays.start, flat), at(arrays.last, flat),
                            at(arrays.fresh, flat), at(arrays.previous, flat)};
    const float g = element.has_gradient() ? element.gradient(from, inv_lambda) : 0.0f;
    float m = at(arrays.m, flat);
    if (element.adds_gradient()) m = element.momentum(m, g);
    if (!moves) {
      arrays.m[flat] = m;
      m_lanes[lane] += m * m;
      return;
    }
    const OuterMove to = element.move(m, g, from.sum, arrays.anchor[flat]);
    if (arrays.m != nullptr) arrays.m[flat] = to.m;
    if (arrays.last_step != nullptr) arrays.last_step[flat] = to.step;
    arrays.anchor[flat] = to.anchor;
    step_lanes[lane] += to.change * to.change;
    if (counts && to.clipped) clipped_lanes[lane] += 1.0f;
  }
};

}  // namespace sotto
