// Adam, AdamW, LAMB and SGD.
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_adam.h"
#include "core/cpu/ops_first_moment.h"
#include "core/kernels/scalar_steps.h"

namespace sotto::scalar {

void adam(const KernelCall& call) { run_elements<AdamOp<FloatState>>(call); }
void adam_low_precision(const KernelCall& call) {
  if (call.arguments<LowPrecisionArgs>().state == StateType::kBf16)
    return run_elements<AdamOp<Bf16State>>(call);
  run_elements<AdamOp<Fp8State<ScalarFp8>>>(call);
}
void sgd(const KernelCall& call) { run_first_moment<SgdElement>(call); }
void sgd_low_precision(const KernelCall& call) { run_low_precision_first_moment<SgdElement>(call); }
void lamb_moments(const KernelCall& call) { run_elements<LambMomentsOp>(call); }
void lamb_update(const KernelCall& call) { run_elements<LambUpdateOp>(call); }

void lamb_scalars(const KernelCall& call) {
  const auto& o = call.of<kernels::LambScalars>();
  const auto& a = call.arguments<TensorArgs>();
  const LambGroupScalars* groups = o.scalars.flat<const LambGroupScalars>();
  TensorState* states = o.states.flat<TensorState>();
  TensorStep* steps = o.steps.flat<TensorStep>();
  for (uint64_t k = 0; k < a.n; ++k) {
    const NormRange& range = a.ranges[k];
    const auto sum_of = [&](const Operand& sums) {
      return add_blocks(sums.flat<const float>(), range.first_block, range.blocks);
    };
    steps[range.tensor] = lamb_step(groups[range.group], sum_of(o.p_sums), sum_of(o.u_sums),
                                    a.average, a.average ? &states[range.tensor] : nullptr);
  }
}

void step_sizes(const KernelCall& call) {
  const auto& o = call.of<kernels::StepSizes>();
  const auto& a = call.arguments<TensorArgs>();
  const GroupScalars* groups = o.scalars.flat<const GroupScalars>();
  TensorStep* steps = o.steps.flat<TensorStep>();
  for (uint64_t k = 0; k < a.n; ++k) {
    steps[a.ranges[k].tensor] = plain_step(groups[a.ranges[k].group]);
  }
}

}  // namespace sotto::scalar
