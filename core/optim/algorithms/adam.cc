#include "core/optim/algorithms/adam.h"

#include <cmath>

namespace sotto {

void emit_adam(StepFrame& frame, const GradientStage& gradient, std::vector<Piece> pieces,
               uint32_t word) {
  const StepShape& shape = frame.shape();
  const kernels::AdamOperands<OperandRef> operands{
      .g = gradient.operand(),
      .m = frame.moment_operand("m"),
      .v = frame.moment_operand("v"),
      .p = list(frame.slots().params, Access::kReadWrite, 32),
      .scalars = frame.scalars_operand<AdamGroupScalars>(),
      .clip = frame.coefficient_operand(gradient),
      .valid = frame.valid_operand()};
  const KernelOptions commit = StepFrame::committing(word);
  if (shape.state == StateType::kF32) {
    frame.builder().kernel<kernels::Adam>(operands, frame.updated(std::move(pieces)),
                                          SourceArgs{gradient.type}, commit);
    return;
  }
  frame.builder().kernel<kernels::AdamLowPrecision>(
      {.adam = operands,
       .step = frame.state_step_operand(),
       .m_exponents = frame.exponents_operand("m"),
       .v_exponents = frame.exponents_operand("v")},
      frame.updated(std::move(pieces)), LowPrecisionArgs{gradient.type, shape.state}, commit);
}

StepPlan build_adam_step(const StepShape& shape) {
  const auto update = [](StepFrame& frame, const GradientStage& gradient) {
    emit_adam(frame, gradient, all_tensor_pieces(*frame.shape().layout), gradient.word);
  };
  return build_dense_step(shape, update, false);
}

void write_adam_scalars(const OptimizerParams& p, uint64_t t, ScalarsRef scalars) {
  auto* s = scalars.as<AdamGroupScalars>();
  if (s == nullptr) return;
  const auto step = static_cast<double>(t);
  s->c1 = static_cast<float>(p.bias_correction ? 1.0 - std::pow(p.beta1, step) : 1.0);
  s->c2 = static_cast<float>(p.bias_correction ? 1.0 - std::pow(p.beta2, step) : 1.0);
  s->decoupled = p.adam.w_mode ? 1 : 0;
}

std::span<const std::string_view> Adam::settable() const {
  static constexpr std::string_view kNames[] = {"lr", "weight_decay", "beta1", "beta2", "eps"};
  return kNames;
}

StepPlan Adam::build(const StepVariant&, const StepShape& shape) const {
  return build_adam_step(shape);
}

void Adam::write_scalars(const StepVariant& variant, size_t group, ScalarsRef s) const {
  Algorithm::write_scalars(variant, group, s);
  write_adam_scalars(d_.groups.params(group), d_.next_t(), s);
}

std::unique_ptr<Algorithm> make_adam(OptimizerData& data) { return std::make_unique<Adam>(data); }

}  // namespace sotto
