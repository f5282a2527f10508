// Numbers that are made once per tensor, instance or step from sums of norm blocks, for every
// device. Sums are float64 sums of block sums in ascending order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/kernels/lamb.h"
#include "core/kernels/onebit_lamb.h"

namespace sotto {

// kNormFinish: the scale of `count` elements, before it is checked.
SOTTO_HOST_DEVICE inline float norm_scale(ScaleKind kind, double sum, uint64_t count) {
  if (count == 0) return 0.0f;
  const double mean = sum / static_cast<double>(count);
  return static_cast<float>(kind == ScaleKind::kL2 ? std::sqrt(mean) : mean);
}

// Of a rank's gradient (kNormMessage).
struct NormMessage {
  double norm;
  uint32_t flags;
  uint32_t reserved;
};
static_assert(sizeof(NormMessage) == 16);

SOTTO_HOST_DEVICE inline NormMessage norm_message_of(double sum, uint32_t flags) {
  const double norm = std::sqrt(sum);
  // x - x is 0 for every number and NaN for everything else.
  return {norm, norm - norm == 0 ? flags : flags | kFlagNonfinite, 0};
}

struct ClipResult {
  float coefficient;
  double norm;
  uint32_t word;
};

// unscale and prior may be null.
SOTTO_HOST_DEVICE inline ClipResult clip_result(const ClipArgs& a, const uint8_t* messages,
                                                const double* unscale, const uint32_t* prior) {
  double sum = 0;
  uint32_t flags = 0;
  for (uint32_t r = 0; r < a.world; ++r) {
    NormMessage message;
    std::memcpy(&message, messages + r * sizeof message, sizeof message);
    sum += message.norm;
    flags |= message.flags;
  }
  const double factor = unscale != nullptr ? *unscale : 1.0;
  const double norm = sum / a.world * factor;
  const double ratio = a.clip / (norm + 1e-6);
  const uint32_t before = prior != nullptr ? *prior : kCommit;
  return {static_cast<float>((a.clip != 0 && ratio < 1 ? ratio : 1.0) * factor), norm,
          before == kCommit && flags != 0 ? a.fail_word : before};
}

// kLambScalars, from the sums of p*p and of u*u.
SOTTO_HOST_DEVICE inline TensorStep lamb_step(const LambGroupScalars& s, double p_sum, double u_sum,
                                              bool average, TensorState* state) {
  const double wn = std::sqrt(p_sum);
  const double un = std::sqrt(u_sum);
  double c = 1;
  if (wn != 0 && un != 0) {
    c = wn / un;
    if (c > s.max_coeff) c = s.max_coeff;
    if (c < s.min_coeff) c = s.min_coeff;
  }
  if (average && c != 1) state->c_avg = s.coeff_beta * state->c_avg + (1 - s.coeff_beta) * c;
  TensorStep step;
  step.step_size = static_cast<float>(s.lamb_lr * c);
  step.trust_ratio = c;
  return step;
}

// kOnebitLambScalars, from the sums of u0*u0 and of u*u and the maximum over the tensor.
SOTTO_HOST_DEVICE inline TensorStep onebit_lamb_step(const OnebitLambGroupScalars& s, double u0_sum,
                                                     double u_sum, double maximum,
                                                     TensorState* state) {
  double factor = maximum;
  if (factor == 0) {  // no valid element
    factor = state->last_factor;
  } else {
    if (s.weight_decay != 0.0f) {
      const double u0 = std::sqrt(u0_sum);
      const double u = std::sqrt(u_sum);
      const double q = u == 0 ? 1 : std::min(1.0, u0 / u);
      factor = factor * q + (1 - q);
    }
    factor = std::min(factor, s.factor_max);
    factor = std::max(factor, s.factor_min);
    factor = std::min(factor, state->last_factor * (1 + s.factor_threshold));
    factor = std::max(factor, state->last_factor * (1 - s.factor_threshold));
    state->last_factor = factor;
  }
  TensorStep step;
  step.trust_ratio = state->c_avg * factor;
  step.step_size = static_cast<float>(s.lr * step.trust_ratio);
  step.factor = factor;
  return step;
}

// kOnebitLambScaling: s_l of a tensor.
SOTTO_HOST_DEVICE inline double tensor_scale(double sum, uint64_t count) {
  return count == 0 ? 0.0 : std::sqrt(sum) / std::sqrt(static_cast<double>(count));
}
// What the switch leaves in the state of a tensor with that scale.
SOTTO_HOST_DEVICE inline void start_compressed(double united, double scale, double debias,
                                               TensorState* state) {
  state->scaling_coeff = scale != 0 ? united / scale : 1;
  state->last_factor = 1;
  if (debias > 0) state->c_avg /= debias;
}

// kStepSizes.
SOTTO_HOST_DEVICE inline TensorStep plain_step(const GroupScalars& s) {
  TensorStep step;
  step.step_size = static_cast<float>(s.lr);
  step.trust_ratio = 1;
  return step;
}

}  // namespace sotto
