// The update of optimizers that keep a first moment at most.
#pragma once

#include <utility>

#include "core/optim/step_frame.h"

namespace sotto {

// All tensors; the gradient's word decides. Element: its kernels (core/kernels/sgd.h). momentum:
// "m" is there. plain, low_precision: arguments for "m" in float32 or not there, and in another
// type.
template <class Element>
void emit_first_moment(StepFrame& frame, const GradientStage& gradient, bool momentum,
                       const typename Element::Plain::Args& plain,
                       const LowPrecisionArgs& low_precision) {
  const kernels::SgdOperands<OperandRef> operands{
      .g = gradient.operand(),
      .m = momentum ? frame.moment_operand("m") : absent(),
      .p = list(frame.slots().params, Access::kReadWrite, 32),
      .scalars = frame.scalars_operand<typename Element::Scalars>(),
      .clip = frame.coefficient_operand(gradient),
      .valid = frame.valid_operand()};
  std::vector<Piece> pieces = frame.updated(all_tensor_pieces(*frame.shape().layout));
  const KernelOptions commit = StepFrame::committing(gradient.word);
  if (!momentum || frame.shape().state == StateType::kF32) {
    frame.builder().kernel<typename Element::Plain>(operands, std::move(pieces), plain, commit);
    return;
  }
  frame.builder().kernel<typename Element::LowPrecision>(
      {.sgd = operands,
       .step = frame.state_step_operand(),
       .m_exponents = frame.exponents_operand("m")},
      std::move(pieces), low_precision, commit);
}

}  // namespace sotto
