// 1-bit Adam (arXiv 2102.02888; specification section 5).
#pragma once

#include "core/optim/algorithms/compressed_momentum.h"

namespace sotto {

StepPlan build_onebit_adam_step(const CompressedStepRequest& request);

class OneBitAdam final : public CompressedMomentum {
 public:
  using CompressedMomentum::CompressedMomentum;
  std::span<const std::string_view> settable() const override;
  void write_scalars(const StepVariant& variant, size_t group, ScalarsRef scalars) const override;

 protected:
  StepPlan build_warm_up(const StepShape& shape) const override;
  StepPlan build_compressed(const CompressedStepRequest& request) const override;
};

}  // namespace sotto
