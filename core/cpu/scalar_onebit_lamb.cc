// 1-bit LAMB: encoder of the momentum, switch to the compressed stage, and both passes of the
// compressed step.
#include <algorithm>

#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_onebit_lamb.h"
#include "core/kernels/scalar_steps.h"

namespace sotto::scalar {
namespace {

// One rank: the momentum itself, after the multiplication and division that more ranks would do.
void onebit_lamb_identity(const KernelCall& call) {
  OnebitLambEncodeOp encode(call);
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const float s = scaling_of(encode.states, p);
    const float magnitude = encode.momentum.magnitude(p, s);
    for (uint64_t i = 0; i < p.count; ++i) {
      encode.c[p.flat + i] =
          encode.masked(p.flat + i)
              ? 0.0f
              : guard_finite(encode.input(p, i, s, magnitude) / s, &encode.flags);
    }
  }
  encode.finish();
}

}  // namespace

void onebit_lamb_encode(const KernelCall& call) {
  if (call.arguments<EncodeArgs>().identity) return onebit_lamb_identity(call);
  run_elements<OnebitLambEncodeOp>(call);
}

void onebit_lamb_encode_undo(const KernelCall& call) {
  OnebitLambEncodeOp encode(call);
  uint32_t unused = 0;
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const float s = scaling_of(encode.states, p);
    const float magnitude = encode.momentum.magnitude(p, s);
    for (uint64_t i = 0; i < p.count; ++i) {
      float& value = encode.c[p.flat + i];
      if (encode.masked(p.flat + i)) {
        value = 0.0f;
        continue;
      }
      const float x = guard_finite(encode.input(p, i, s, magnitude), &unused);
      value = undo_encode(value, x, encode.old_scales[p.scale], call.paired_ran);
    }
  }
}

void freeze_variance(const KernelCall& call) { run_elements<FreezeVarianceOp>(call); }
void onebit_lamb_factor(const KernelCall& call) { run_elements<FactorOp>(call); }
void momentum_update(const KernelCall& call) { run_elements<MomentumUpdateOp>(call); }

void onebit_lamb_scaling(const KernelCall& call) {
  const auto& o = call.of<kernels::OnebitLambScaling>();
  const auto& a = call.arguments<ScalingArgs>();
  const float* sums = o.sums.flat<const float>();
  const uint64_t* counts = o.counts.flat<const uint64_t>();
  TensorState* states = o.states.flat<TensorState>();
  const auto scale_of = [&](uint64_t k) {
    return tensor_scale(add_blocks(sums, a.ranges[k].first_block, a.ranges[k].blocks), counts[k]);
  };
  double united = 0;
  uint64_t tensors = 0;
  for (uint64_t k = 0; k < a.n; ++k) {
    const double scale = scale_of(k);
    united += scale;
    tensors += scale != 0;
  }
  if (tensors != 0) united /= static_cast<double>(tensors);
  for (uint64_t k = 0; k < a.n; ++k) {
    start_compressed(united, scale_of(k), a.debias, &states[a.ranges[k].tensor]);
  }
}

void onebit_lamb_scalars(const KernelCall& call) {
  const auto& o = call.of<kernels::OnebitLambScalars>();
  const auto& a = call.arguments<TensorArgs>();
  const float* u0_sums = o.u0_sums.flat<const float>();
  const float* u_sums = o.u_sums.flat<const float>();
  const float* maxima = o.maxima.flat<const float>();
  const OnebitLambGroupScalars* groups = o.scalars.flat<const OnebitLambGroupScalars>();
  TensorState* states = o.states.flat<TensorState>();
  TensorStep* steps = o.steps.flat<TensorStep>();
  for (uint64_t k = 0; k < a.n; ++k) {
    const NormRange& range = a.ranges[k];
    double maximum = 0;
    for (uint64_t b = range.first_block; b < range.first_block + range.blocks; ++b) {
      maximum = std::max(maximum, static_cast<double>(maxima[b]));
    }
    steps[range.tensor] = onebit_lamb_step(
        groups[range.group], add_blocks(u0_sums, range.first_block, range.blocks),
        add_blocks(u_sums, range.first_block, range.blocks), maximum, &states[range.tensor]);
  }
}

void momentum_from_bits(const KernelCall& call) {
  const auto& o = call.of<kernels::MomentumFromBits>();
  const Momentum momentum{nullptr, o.bits.flat<const uint8_t>(), o.messages.flat<const uint8_t>()};
  const TensorState* states = o.states.flat<const TensorState>();
  float* m = o.m.flat<float>();
  const uint8_t* valid = o.valid.flat<const uint8_t>();
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const float magnitude = momentum.magnitude(p, scaling_of(states, p));
    for (uint64_t i = 0; i < p.count; ++i) {
      const bool masked = valid != nullptr && !get_bit(valid, p.flat + i);
      m[p.flat + i] = masked ? 0.0f : momentum.at(p.flat + i, magnitude);
    }
  }
}

}  // namespace sotto::scalar
