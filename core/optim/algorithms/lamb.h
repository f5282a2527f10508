// LAMB (specification section 4).
#pragma once

#include "core/optim/algorithm.h"

namespace sotto {

// A step of all tensors. average: the moving average of the trust ratios is updated as well.
StepPlan build_lamb_step(const StepShape& shape, bool average);
// What its kernels read of a group beside what all types have. t: state step.
void write_lamb_scalars(const OptimizerParams& params, uint64_t t, ScalarsRef scalars);

class Lamb final : public Algorithm {
 public:
  using Algorithm::Algorithm;
  std::vector<StateArraySpec> arrays() const override { return {moment("m"), moment("v")}; }
  std::span<const std::string_view> settable() const override;
  StepPlan build(const StepVariant& variant, const StepShape& shape) const override;
  void write_scalars(const StepVariant& variant, size_t group, ScalarsRef scalars) const override;
};

}  // namespace sotto
