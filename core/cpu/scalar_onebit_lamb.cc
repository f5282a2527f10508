// 1-bit LAMB: front (momentum and encoder), switch to the compressed stage, and both passes of the
// compressed step.
#include <algorithm>
#include <cmath>

#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_onebit_lamb.h"

namespace sotto::scalar {
namespace {

// One rank: the momentum itself, after the multiplication and division that more ranks would do.
void front_identity(const KernelCall& call) {
  FrontOp front(call);
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const float s = scaling_of(front.states, p);
    const float magnitude = front.momentum.magnitude(p, s);
    for (uint64_t i = 0; i < p.count; ++i) {
      front.c[p.flat + i] = front.masked(p.flat + i)
                                ? 0.0f
                                : guard_finite(front.input(p, i, s, magnitude) / s, &front.flags);
    }
  }
  front.finish();
}

}  // namespace

void onebit_lamb_front(const KernelCall& call) {
  if (call.arguments<EncodeArgs>().identity) return front_identity(call);
  run_elements<FrontOp>(call);
}

void onebit_lamb_front_undo(const KernelCall& call) {
  FrontOp front(call);
  uint32_t unused = 0;
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const float s = scaling_of(front.states, p);
    const float magnitude = front.momentum.magnitude(p, s);
    for (uint64_t i = 0; i < p.count; ++i) {
      float& value = front.c[p.flat + i];
      if (front.masked(p.flat + i)) {
        value = 0.0f;
        continue;
      }
      const float x = guard_finite(front.input(p, i, s, magnitude), &unused);
      value = undo_encode(value, x, front.old_scales[p.scale], call.paired_ran);
    }
  }
}

void onebit_lamb_prepare(const KernelCall& call) { run_elements<PrepareOp>(call); }
void onebit_lamb_factor(const KernelCall& call) { run_elements<FactorOp>(call); }
void onebit_lamb_update(const KernelCall& call) { run_elements<OnebitUpdateOp>(call); }

void onebit_lamb_scaling(const KernelCall& call) {
  const auto& a = call.arguments<ScalingArgs>();
  const float* sums = call.operands[0].flat<const float>();
  const uint64_t* counts = call.operands[1].flat<const uint64_t>();
  TensorState* states = call.operands[2].flat<TensorState>();
  const auto scale_of = [&](uint64_t k) {
    if (counts[k] == 0) return 0.0;
    const double norm = std::sqrt(add_blocks(sums, a.ranges[k].first_block, a.ranges[k].blocks));
    return norm / std::sqrt(static_cast<double>(counts[k]));
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
    const double scale = scale_of(k);
    TensorState& state = states[a.ranges[k].tensor];
    state.scaling_coeff = scale != 0 ? united / scale : 1;
    state.last_factor = 1;
    if (a.debias > 0) state.c_avg /= a.debias;
  }
}

void onebit_lamb_scalars(const KernelCall& call) {
  const auto& a = call.arguments<TensorArgs>();
  const float* u0_sums = call.operands[0].flat<const float>();
  const float* u_sums = call.operands[1].flat<const float>();
  const float* maxima = call.operands[2].flat<const float>();
  const GroupScalars* groups = call.operands[3].flat<const GroupScalars>();
  TensorState* states = call.operands[4].flat<TensorState>();
  TensorStep* steps = call.operands[5].flat<TensorStep>();
  for (uint64_t k = 0; k < a.n; ++k) {
    const NormRange& range = a.ranges[k];
    const GroupScalars& s = groups[range.group];
    TensorState& state = states[range.tensor];
    double factor = 0;
    for (uint64_t b = range.first_block; b < range.first_block + range.blocks; ++b) {
      factor = std::max(factor, static_cast<double>(maxima[b]));
    }
    if (factor == 0) {  // no valid element
      factor = state.last_factor;
    } else {
      if (s.weight_decay != 0.0f) {
        const double u0 = std::sqrt(add_blocks(u0_sums, range.first_block, range.blocks));
        const double u = std::sqrt(add_blocks(u_sums, range.first_block, range.blocks));
        const double q = u == 0 ? 1 : std::min(1.0, u0 / u);
        factor = factor * q + (1 - q);
      }
      factor = std::min(factor, s.factor_max);
      factor = std::max(factor, s.factor_min);
      factor = std::min(factor, state.last_factor * (1 + s.factor_threshold));
      factor = std::max(factor, state.last_factor * (1 - s.factor_threshold));
      state.last_factor = factor;
    }
    TensorStep step;
    step.trust_ratio = state.c_avg * factor;
    step.step_size = static_cast<float>(s.lr * step.trust_ratio);
    step.factor = factor;
    steps[range.tensor] = step;
  }
}

void momentum_from_bits(const KernelCall& call) {
  const Momentum momentum{nullptr, call.operands[0].flat<const uint8_t>(),
                          call.operands[1].flat<const uint8_t>()};
  const TensorState* states = call.operands[2].flat<const TensorState>();
  float* m = call.operands[3].flat<float>();
  const uint8_t* valid = call.operands[4].flat<const uint8_t>();
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const float magnitude =
        momentum.magnitude(p, static_cast<float>(states[p.tensor].scaling_coeff));
    for (uint64_t i = 0; i < p.count; ++i) {
      const bool masked = valid != nullptr && !get_bit(valid, p.flat + i);
      m[p.flat + i] = masked ? 0.0f : momentum.at(p.flat + i, magnitude);
    }
  }
}

}  // namespace sotto::scalar
