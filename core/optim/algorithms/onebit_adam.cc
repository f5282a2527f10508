#include "core/optim/algorithms/onebit_adam.h"

#include "core/optim/algorithms/adam.h"

namespace sotto {
namespace {

// One pass over all tensors with the group's learning rate as step size.
class OneBitAdamStep final : public CompressedStep {
 public:
  using CompressedStep::CompressedStep;

 private:
  void update(uint32_t word) override {
    const std::vector<NormRange> ranges = layout_.tensor_ranges();
    b_.kernel<kernels::StepSizes>(
        {.scalars = frame_.scalars_operand(), .steps = frame_.steps_operand(Access::kWrite)}, {},
        TensorArgs{b_.keep_array(std::span<const NormRange>(ranges)), ranges.size(), false});
    emit_update(frame_.updated(compressed_pieces(layout_)), word);
  }
};

}  // namespace

StepPlan build_onebit_adam_step(const CompressedStepRequest& request) {
  return OneBitAdamStep(request).build();
}

std::span<const std::string_view> OneBitAdam::settable() const {
  static constexpr std::string_view kNames[] = {"lr", "weight_decay", "beta1", "beta2", "eps"};
  return kNames;
}

void OneBitAdam::write_scalars(const StepVariant& variant, size_t group, ScalarsRef s) const {
  Algorithm::write_scalars(variant, group, s);
  write_adam_scalars(d_.groups.params(group), d_.next_t(), s);
}

StepPlan OneBitAdam::build_warm_up(const StepShape& shape) const { return build_adam_step(shape); }

StepPlan OneBitAdam::build_compressed(const CompressedStepRequest& request) const {
  return build_onebit_adam_step(request);
}

std::unique_ptr<Algorithm> make_onebit_adam(OptimizerData& data) {
  return std::make_unique<OneBitAdam>(data);
}

}  // namespace sotto
