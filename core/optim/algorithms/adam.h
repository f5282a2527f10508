// Adam and AdamW (specification section 3).
#pragma once

#include "core/optim/algorithm.h"

namespace sotto {

// The update of some tensors, for which `word` decides.
void emit_adam(StepFrame& frame, const GradientStage& gradient, std::vector<Piece> pieces,
               uint32_t word);
// A step of all tensors.
StepPlan build_adam_step(const StepShape& shape);
// What its kernels read of a group beside what all types have. t: state step.
void write_adam_scalars(const OptimizerParams& params, uint64_t t, ScalarsRef scalars);

class Adam final : public Algorithm {
 public:
  using Algorithm::Algorithm;
  std::vector<StateArraySpec> arrays() const override { return {moment("m"), moment("v")}; }
  std::span<const std::string_view> settable() const override;
  StepPlan build(const StepVariant& variant, const StepShape& shape) const override;
  void write_scalars(const StepVariant& variant, size_t group, ScalarsRef scalars) const override;
};

}  // namespace sotto
