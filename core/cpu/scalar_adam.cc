// Adam, AdamW and LAMB.
#include <algorithm>
#include <cmath>

#include "core/cpu/elements.h"
#include "core/cpu/kernel_table.h"
#include "core/cpu/norm_blocks.h"

namespace sotto::scalar {

void adam(const KernelCall& call) {
  const auto& a = call.arguments<SourceArgs>();
  const Source source{&call.operands[0], a.flat_base, a.flat};
  float* m = call.operands[1].flat<float>();
  float* v = call.operands[2].flat<float>();
  const float* clip = call.operands[5].flat<const float>();
  const uint8_t* valid = call.operands[6].flat<const uint8_t>();
  for (const Piece& piece : call.pieces) {
    if (piece.tensor == kNoTensor) continue;
    const GroupScalars& s = call.operands[4].flat<const GroupScalars>()[piece.group];
    const float lr = static_cast<float>(s.lr);
    const float* g = source.of(piece);
    float* p = call.operands[3].list<float>(piece.tensor) + piece.offset;
    for (uint64_t i = 0; i < piece.count; ++i) {
      const uint64_t flat = piece.flat + i;
      float gradient = clip != nullptr ? g[i] * *clip : g[i];
      if (valid != nullptr && !get_bit(valid, flat)) gradient = 0.0f;
      if (s.decoupled == 0) gradient = with_decay(s, gradient, p[i]);
      const Moments next = adam_moments(s, m[flat], v[flat], gradient);
      m[flat] = next.m;
      v[flat] = next.v;
      p[i] = adam_parameter(s, next.m, next.v, p[i], lr);
    }
  }
}

void lamb_moments(const KernelCall& call) {
  const auto& a = call.arguments<SourceArgs>();
  const Source source{&call.operands[0], a.flat_base, a.flat};
  float* m = call.operands[1].flat<float>();
  float* v = call.operands[2].flat<float>();
  const float* clip = call.operands[7].flat<const float>();
  const uint8_t* valid = call.operands[8].flat<const uint8_t>();
  NormBlocks p_sums(call.operands[4].flat<float>());
  NormBlocks u_sums(call.operands[5].flat<float>());
  for_each_run(
      call.pieces, [&](const Piece& piece, uint64_t first, uint64_t count, uint64_t block) {
        float* p_lanes = p_sums.open(block);
        float* u_lanes = u_sums.open(block);
        if (piece.tensor == kNoTensor) return;
        const GroupScalars& s = call.operands[6].flat<const GroupScalars>()[piece.group];
        const float* g = source.of(piece) + first;
        const float* p = call.operands[3].list<const float>(piece.tensor) + piece.offset + first;
        for (uint64_t i = 0; i < count; ++i) {
          const uint64_t flat = piece.flat + first + i;
          float gradient = clip != nullptr ? g[i] * *clip : g[i];
          if (valid != nullptr && !get_bit(valid, flat)) gradient = 0.0f;
          const Moments next = adam_moments(s, m[flat], v[flat], gradient);
          m[flat] = next.m;
          v[flat] = next.v;
          const float u = lamb_direction(s, next.m, next.v, p[i]);
          const uint64_t lane = (piece.lane + first + i) % kNormLanes;
          p_lanes[lane] += p[i] * p[i];
          u_lanes[lane] += u * u;
        }
      });
  p_sums.finish();
  u_sums.finish();
}

void lamb_scalars(const KernelCall& call) {
  const auto& a = call.arguments<TensorArgs>();
  const GroupScalars* groups = call.operands[2].flat<const GroupScalars>();
  TensorState* states = call.operands[3].flat<TensorState>();
  TensorStep* steps = call.operands[4].flat<TensorStep>();
  for (uint64_t k = 0; k < a.n; ++k) {
    const NormRange& range = a.ranges[k];
    const GroupScalars& s = groups[range.group];
    const double wn = std::sqrt(
        add_blocks(call.operands[0].flat<const float>(), range.first_block, range.blocks));
    const double un = std::sqrt(
        add_blocks(call.operands[1].flat<const float>(), range.first_block, range.blocks));
    double c = 1;
    if (wn != 0 && un != 0) {
      c = wn / un;
      if (c > s.max_coeff) c = s.max_coeff;
      if (c < s.min_coeff) c = s.min_coeff;
    }
    if (a.average && c != 1) {
      double& average = states[range.tensor].c_avg;
      average = s.coeff_beta * average + (1 - s.coeff_beta) * c;
    }
    TensorStep step;
    step.step_size = static_cast<float>(s.lamb_lr * c);
    step.trust_ratio = c;
    steps[range.tensor] = step;
  }
}

void lamb_update(const KernelCall& call) {
  const float* m = call.operands[0].flat<const float>();
  const float* v = call.operands[1].flat<const float>();
  for (const Piece& piece : call.pieces) {
    if (piece.tensor == kNoTensor) continue;
    const GroupScalars& s = call.operands[3].flat<const GroupScalars>()[piece.group];
    const float step = call.operands[4].flat<const TensorStep>()[piece.tensor].step_size;
    float* p = call.operands[2].list<float>(piece.tensor) + piece.offset;
    for (uint64_t i = 0; i < piece.count; ++i) {
      p[i] = p[i] - step * lamb_direction(s, m[piece.flat + i], v[piece.flat + i], p[i]);
    }
  }
}

}  // namespace sotto::scalar
