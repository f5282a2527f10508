// 1-bit LAMB (arXiv 2104.06069; specification section 7).
#pragma once

#include "core/optim/algorithms/compressed_momentum.h"

namespace sotto {

// debias: what the averages of the trust ratios are divided by in the first step; 0: nothing.
StepPlan build_onebit_lamb_step(const CompressedStepRequest& request, double debias);

class OneBitLamb final : public CompressedMomentum {
 public:
  using CompressedMomentum::CompressedMomentum;
  std::vector<StateArraySpec> arrays() const override;
  std::span<const std::string_view> settable() const override;
  void write_scalars(const StepVariant& variant, size_t group, ScalarsRef scalars) const override;
  void write_padding_scalars(ScalarsRef scalars) const override;
  Status describe(StateErrors errors, OptimSnapshot* s) override;
  Status check(const OptimSnapshot& s, StateErrors errors) const override;
  Status restore(const OptimSnapshot& s) override;
  std::span<const ArrayKey> array_keys() const override;
  Status read_arrays(const ArrayReader& reader, OptimSnapshot* s) const override;

 protected:
  StepPlan build_warm_up(const StepShape& shape) const override;
  StepPlan build_compressed(const CompressedStepRequest& request) const override;
  Status restore_stage(const std::vector<uint8_t>& valid) override;

 private:
  // The momentum of padding that is data belongs to this rank's own state.
  uint64_t padding_values() const {
    return d_.layout->elements_with_padding() - d_.layout->elements();
  }

  uint64_t average_since_ = 0;  // updates before the average of trust ratios started
};

}  // namespace sotto
