#include "core/optim/algorithms/sgd.h"

namespace sotto {
namespace {

void emit_sgd(StepFrame& frame, const GradientStage& gradient, bool momentum, bool nesterov) {
  const StepShape& shape = frame.shape();
  const kernels::SgdOperands<OperandRef> operands{
      .g = gradient.operand(),
      .m = momentum ? frame.moment_operand("m") : absent(),
      .p = list(frame.slots().params, Access::kReadWrite, 32),
      .scalars = frame.scalars_operand(),
      .clip = frame.coefficient_operand(gradient),
      .valid = frame.valid_operand()};
  std::vector<Piece> pieces = frame.updated(all_tensor_pieces(*shape.layout));
  const KernelOptions commit = StepFrame::committing(gradient.word);
  if (!momentum || shape.state == StateType::kF32) {
    frame.builder().kernel<kernels::Sgd>(operands, std::move(pieces),
                                         SgdArgs{nesterov, gradient.type}, commit);
    return;
  }
  frame.builder().kernel<kernels::SgdNarrow>(
      {.sgd = operands,
       .step = frame.state_step_operand(),
       .m_exponents = frame.exponents_operand("m")},
      std::move(pieces), NarrowArgs{gradient.type, shape.state, nesterov}, commit);
}

}  // namespace

StepPlan build_sgd_step(const StepShape& shape, bool momentum, bool nesterov) {
  const auto update = [=](StepFrame& frame, const GradientStage& gradient) {
    emit_sgd(frame, gradient, momentum, nesterov);
  };
  return build_dense_step(shape, update, false);
}

std::vector<StateArraySpec> Sgd::arrays() const {
  if (d_.groups[0].momentum == 0) return {};
  return {moment("m")};
}

std::span<const std::string_view> Sgd::settable() const {
  static constexpr std::string_view kNames[] = {"lr", "weight_decay", "momentum"};
  return kNames;
}

Status Sgd::check_setting(std::string_view name, size_t group, double value) const {
  if (name != "momentum" || (value == 0) != has_momentum()) return ok_status();
  return invalid_argument(
      "momentum of group {} is {}; an optimizer that was created {} momentum keeps {}", group,
      value, has_momentum() ? "with" : "without", has_momentum() ? "one above 0" : "0");
}

StepPlan Sgd::build(const StepVariant&, const StepShape& shape) const {
  return build_sgd_step(shape, has_momentum(), d_.groups[0].nesterov);
}

void Sgd::write_scalars(const StepVariant&, size_t group, GroupScalars* s) const {
  const OptimizerParams p = d_.groups.params(group);
  s->b1 = static_cast<float>(p.momentum);
  s->one_minus_b1 = d_.step == 0 ? 1.0f : static_cast<float>(1.0 - p.dampening);
}

Status Sgd::check_importable() const {
  return unsupported("SGD has no arrays to import; allowed: Adam, AdamW, Lamb and the 1-bit types");
}

}  // namespace sotto
