// Adam, AdamW, LAMB and SGD.
#include <algorithm>
#include <cmath>

#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_adam.h"
#include "core/cpu/ops_sgd.h"

namespace sotto::scalar {

void adam(const KernelCall& call) { run_elements<AdamOp<FloatState>>(call); }
void adam_narrow(const KernelCall& call) {
  if (call.arguments<NarrowArgs>().state == StateType::kBf16)
    return run_elements<AdamOp<Bf16State>>(call);
  run_elements<AdamOp<Fp8State<ScalarFp8>>>(call);
}
void sgd(const KernelCall& call) { run_elements<SgdOp<FloatState>>(call); }
void sgd_narrow(const KernelCall& call) {
  if (call.arguments<NarrowArgs>().state == StateType::kBf16)
    return run_elements<SgdOp<Bf16State>>(call);
  run_elements<SgdOp<Fp8State<ScalarFp8>>>(call);
}
void lamb_moments(const KernelCall& call) { run_elements<LambMomentsOp>(call); }
void lamb_update(const KernelCall& call) { run_elements<LambUpdateOp>(call); }

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

void step_sizes(const KernelCall& call) {
  const auto& a = call.arguments<TensorArgs>();
  const GroupScalars* groups = call.operands[0].flat<const GroupScalars>();
  TensorStep* steps = call.operands[1].flat<TensorStep>();
  for (uint64_t k = 0; k < a.n; ++k) {
    TensorStep step;
    step.step_size = static_cast<float>(groups[a.ranges[k].group].lr);
    step.trust_ratio = 1;
    steps[a.ranges[k].tensor] = step;
  }
}

}  // namespace sotto::scalar
