// SGD with momentum, dampening and Nesterov's form, as in PyTorch.
#pragma once

#include "core/optim/algorithm.h"

namespace sotto {

// A step of all tensors. momentum: "m" is there.
StepPlan build_sgd_step(const StepShape& shape, bool momentum, bool nesterov);

class Sgd final : public Algorithm {
 public:
  using Algorithm::Algorithm;
  std::vector<StateArraySpec> arrays() const override;
  std::span<const std::string_view> settable() const override;
  Status check_setting(std::string_view name, size_t group, double value) const override;
  StepPlan build(const StepVariant& variant, const StepShape& shape) const override;
  void write_scalars(const StepVariant& variant, size_t group, ScalarsRef scalars) const override;
  Status check_importable() const override;

 private:
  bool has_momentum() const { return d_.arrays.has("m"); }
};

}  // namespace sotto
