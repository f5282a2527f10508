// 1-bit LAMB: front (momentum and encoder), switch to the compressed stage, and both passes of the
// compressed step.
#include <algorithm>
#include <cmath>

#include "core/cpu/elements.h"
#include "core/cpu/kernel_table.h"
#include "core/cpu/norm_blocks.h"

namespace sotto::scalar {
namespace {

// Operands that the front and its undo read.
struct Front {
  explicit Front(const KernelCall& call)
      : gradients(&call.operands[0]),
        momentum{call.operands[1].flat<const float>(), call.operands[2].flat<const uint8_t>(),
                 call.operands[3].flat<const uint8_t>(), call.arguments<EncodeArgs>().instances},
        c(call.operands[4].flat<float>()),
        old_scales(call.operands[5].flat<const float>()),
        valid(call.operands[8].flat<const uint8_t>()),
        groups(call.operands[10].flat<const GroupScalars>()),
        states(call.operands[11].flat<const TensorState>()),
        clip(call.operands[12].flat<const float>()) {}

  float scaling(const Piece& p) const { return static_cast<float>(states[p.tensor].scaling_coeff); }
  bool masked(uint64_t flat) const { return valid != nullptr && !get_bit(valid, flat); }
  // x of element j of a piece; not for masked elements.
  float input(const Piece& p, uint64_t j, float s, float magnitude) const {
    const float g = gradients->list<const float>(p.tensor)[p.offset + j];
    return front_input(groups[p.group], momentum.at(p.flat + j, magnitude),
                       clip != nullptr ? g * *clip : g, s);
  }

  const Operand* gradients;
  Momentum momentum;
  float* c;
  const float* old_scales;
  const uint8_t* valid;
  const GroupScalars* groups;
  const TensorState* states;
  const float* clip;
};

// One rank: the momentum itself, after the multiplication and division that more ranks would do.
void front_identity(const KernelCall& call, const Front& front) {
  uint32_t flags = 0;
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const float s = front.scaling(p);
    const float magnitude = front.momentum.magnitude(p, s);
    for (uint64_t i = 0; i < p.count; ++i) {
      front.c[p.flat + i] = front.masked(p.flat + i)
                                ? 0.0f
                                : guard_finite(front.input(p, i, s, magnitude) / s, &flags);
    }
  }
  raise_flags(call.operands[9].flat<uint32_t>(), flags);
}

// Operands of pass A.
struct Factor {
  explicit Factor(const KernelCall& call)
      : fresh{call.operands[0].flat<const float>(), call.operands[1].flat<const uint8_t>(),
              call.operands[2].flat<const uint8_t>(), call.arguments<MomentumArgs>().instances},
        old{call.operands[3].flat<const float>(), call.operands[4].flat<const uint8_t>(),
            call.operands[5].flat<const uint8_t>(), call.arguments<MomentumArgs>().instances},
        vf(call.operands[6].flat<float>()),
        den(call.operands[7].flat<const float>()),
        valid(call.operands[9].flat<const uint8_t>()),
        groups(call.operands[13].flat<const GroupScalars>()),
        states(call.operands[14].flat<const TensorState>()) {}

  Momentum fresh, old;
  float* vf;
  const float* den;
  const uint8_t* valid;
  const GroupScalars* groups;
  const TensorState* states;
};

}  // namespace

void onebit_lamb_front(const KernelCall& call) {
  const auto& a = call.arguments<EncodeArgs>();
  const Front front(call);
  if (a.identity) return front_identity(call, front);
  uint8_t* bits = call.operands[6].flat<uint8_t>();
  NormBlocks sums(call.operands[7].flat<float>());
  uint32_t flags = 0;
  for_each_run(call.pieces, [&](const Piece& p, uint64_t first, uint64_t count, uint64_t block) {
    float* lanes = sums.open(block);
    if (p.tensor == kNoTensor) return set_bits(bits, p.flat + first - a.bits_base, count);
    const float s = front.scaling(p);
    const float magnitude = front.momentum.magnitude(p, s);
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = p.flat + j;
      float value = 0.0f;
      if (!front.masked(flat)) {
        const float x = guard_finite(front.input(p, j, s, magnitude), &flags);
        value = x + residual_of(front.c[flat], front.old_scales[p.scale]);
        lanes[(p.lane + j) % kNormLanes] += norm_term(a.scale, value);
      }
      front.c[flat] = value;
      set_bit(bits, flat - a.bits_base, value >= 0.0f);
    }
  });
  sums.finish();
  raise_flags(call.operands[9].flat<uint32_t>(), flags);
}

void onebit_lamb_front_undo(const KernelCall& call) {
  const Front front(call);
  uint32_t unused = 0;
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const float s = front.scaling(p);
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

void onebit_lamb_prepare(const KernelCall& call) {
  const bool mask_zero = call.arguments<PrepareArgs>().mask_zero_variance;
  const float* m = call.operands[0].flat<const float>();
  const float* v = call.operands[1].flat<const float>();
  float* vf = call.operands[2].flat<float>();
  float* den = call.operands[3].flat<float>();
  uint8_t* valid = call.operands[4].flat<uint8_t>();
  NormBlocks sums(call.operands[5].flat<float>());
  for_each_run(call.pieces, [&](const Piece& p, uint64_t first, uint64_t count, uint64_t block) {
    float* lanes = sums.open(block);
    if (p.tensor == kNoTensor) return;
    const GroupScalars& s = call.operands[6].flat<const GroupScalars>()[p.group];
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = p.flat + j;
      vf[flat] = v[flat];
      den[flat] = std::sqrt(v[flat]) + s.eps;
      // Tensors start at any bit, so threads of one call may share a byte.
      if (valid != nullptr && mask_zero && v[flat] == 0.0f) clear_bit_shared(valid, flat);
      if (valid == nullptr || get_bit_shared(valid, flat)) {
        lanes[(p.lane + j) % kNormLanes] += m[flat] * m[flat];
      }
    }
  });
  sums.finish();
}

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

void onebit_lamb_factor(const KernelCall& call) {
  const Factor f(call);
  NormBlocks u0_sums(call.operands[10].flat<float>());
  NormBlocks u_sums(call.operands[11].flat<float>());
  BlockMaxima maxima(call.operands[12].flat<float>());
  for_each_run(call.pieces, [&](const Piece& p, uint64_t first, uint64_t count, uint64_t block) {
    float* u0_lanes = u0_sums.open(block);
    float* u_lanes = u_sums.open(block);
    float* best = maxima.open(block);
    if (p.tensor == kNoTensor) return;
    const GroupScalars& s = f.groups[p.group];
    const float scaling = static_cast<float>(f.states[p.tensor].scaling_coeff);
    const float new_magnitude = f.fresh.magnitude(p, scaling);
    const float old_magnitude = f.old.magnitude(p, scaling);
    const float* parameters = call.operands[8].list<const float>(p.tensor) + p.offset;
    for (uint64_t j = first; j < first + count; ++j) {
      const uint64_t flat = p.flat + j;
      float u0 = 0.0f;
      if (f.valid == nullptr || get_bit(f.valid, flat)) {
        const float m = f.fresh.at(flat, new_magnitude);
        f.vf[flat] = fresh_variance(s, m, f.old.at(flat, old_magnitude), f.vf[flat]);
        const float ratio = f.den[flat] / (std::sqrt(f.vf[flat]) + s.eps);
        if (ratio > *best) *best = ratio;
        u0 = m / f.den[flat];
      }
      if (s.weight_decay == 0.0f) continue;
      const float u = with_decay(s, u0, parameters[j]);
      u0_lanes[(p.lane + j) % kNormLanes] += u0 * u0;
      u_lanes[(p.lane + j) % kNormLanes] += u * u;
    }
  });
  u0_sums.finish();
  u_sums.finish();
  maxima.finish();
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

void onebit_lamb_update(const KernelCall& call) {
  const Momentum momentum{
      call.operands[0].flat<const float>(), call.operands[1].flat<const uint8_t>(),
      call.operands[2].flat<const uint8_t>(), call.arguments<MomentumArgs>().instances};
  const float* den = call.operands[3].flat<const float>();
  const uint8_t* valid = call.operands[5].flat<const uint8_t>();
  for (const Piece& piece : call.pieces) {
    if (piece.tensor == kNoTensor) continue;
    const GroupScalars& s = call.operands[6].flat<const GroupScalars>()[piece.group];
    const float step = call.operands[7].flat<const TensorStep>()[piece.tensor].step_size;
    const float magnitude = momentum.magnitude(
        piece,
        static_cast<float>(call.operands[8].flat<const TensorState>()[piece.tensor].scaling_coeff));
    float* p = call.operands[4].list<float>(piece.tensor) + piece.offset;
    for (uint64_t i = 0; i < piece.count; ++i) {
      const uint64_t flat = piece.flat + i;
      const bool masked = valid != nullptr && !get_bit(valid, flat);
      const float u0 = masked ? 0.0f : momentum.at(flat, magnitude) / den[flat];
      p[i] = p[i] - step * with_decay(s, u0, p[i]);
    }
  }
}

void momentum_from_bits(const KernelCall& call) {
  const Momentum momentum{nullptr, call.operands[0].flat<const uint8_t>(),
                          call.operands[1].flat<const uint8_t>(),
                          call.arguments<MomentumArgs>().instances};
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
