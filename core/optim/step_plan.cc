#include "core/optim/step_plan.h"

#include "core/optim/step_frame.h"

namespace sotto {
namespace {

// Where LAMB's first pass leaves the direction of each tensor for the second: one slot per tensor;
// returns the first. Averages of this run are overwritten, if they are float32. Otherwise tensors
// share a buffer with room for the largest; the caller's gradients are only read.
uint32_t direction_list(StepFrame& frame, const GradientStage& gradient) {
  if (gradient.own) return gradient.list;
  PlanBuilder& b = frame.builder();
  uint64_t largest = 4;
  std::vector<uint64_t> bytes;
  for (const LayoutTensor& t : frame.shape().layout->tensors()) {
    bytes.push_back(t.count * 4);
    largest = std::max(largest, t.count * 4);
  }
  const uint32_t shared = b.scratch(largest);
  const uint32_t first = b.bound_list(bytes);
  for (uint32_t t = 0; t < bytes.size(); ++t) b.alias(first + t, shared, 0);
  return first;
}

// LAMB tensor after tensor, so that the second pass finds small tensors in the cache.
void emit_lamb(StepFrame& frame, const GradientStage& gradient, bool average) {
  PlanBuilder& b = frame.builder();
  const CompressedLayout& layout = *frame.shape().layout;
  const StepSlots& s = frame.slots();
  const uint64_t block_bytes = std::max<uint64_t>(1, layout.tensor_blocks()) * 4;
  const uint32_t p_blocks = b.scratch(block_bytes);
  const uint32_t u_blocks = b.scratch(block_bytes);
  const uint32_t directions = direction_list(frame, gradient);
  const std::vector<NormRange> ranges = layout.tensor_ranges();
  const KernelOptions commit = StepFrame::committing(gradient.word);
  for (uint32_t t = 0; t < ranges.size(); ++t) {
    if (ranges[t].count == 0 || frame.frozen(t)) continue;
    std::vector<Piece> pieces = layout.tensor_pieces(t);
    b.kernel(KernelId::kLambMoments,
             {gradient.operand(), flat(s.m, Access::kReadWrite, 32),
              flat(s.v, Access::kReadWrite, 32), list(s.params, Access::kRead, 32),
              blocks(p_blocks, Access::kWrite), blocks(u_blocks, Access::kWrite),
              frame.scalars_operand(), frame.coefficient_operand(gradient), frame.valid_operand(),
              list(directions, Access::kWrite, 32)},
             pieces, SourceArgs{gradient.type}, commit);
    b.kernel(KernelId::kLambScalars,
             {StepFrame::blocks_operand(p_blocks, ranges[t]),
              StepFrame::blocks_operand(u_blocks, ranges[t]), frame.scalars_operand(),
              frame.states_operand(Access::kReadWrite), frame.steps_operand(Access::kReadWrite)},
             {}, frame.one_tensor(ranges[t], average), commit);
    b.kernel(KernelId::kLambUpdate,
             {list(directions, Access::kRead, 32), list(s.params, Access::kReadWrite, 32),
              frame.steps_operand(Access::kRead)},
             std::move(pieces), NoArgs{}, commit);
  }
}

}  // namespace

StepPlan build_accumulation(const StepShape& shape, bool first) {
  StepFrame frame(shape);
  frame.accumulate(first, absent());
  return frame.take();
}

StepPlan build_full_step(const FullStepRequest& request) {
  StepFrame frame(request.shape);
  const GradientStage gradient = frame.average_gradients();
  bool tensor_steps = false;
  switch (request.update) {
    case DenseUpdate::kAdam:
      frame.adam_update(gradient, all_tensor_pieces(*request.shape.layout), gradient.word);
      break;
    case DenseUpdate::kSgd: frame.sgd_update(gradient, request.momentum, request.nesterov); break;
    case DenseUpdate::kLamb:
    case DenseUpdate::kLambAverage:
      emit_lamb(frame, gradient, request.update == DenseUpdate::kLambAverage);
      tensor_steps = true;
      break;
  }
  return frame.finish(gradient.word, frame.worker_messages(), tensor_steps);
}

}  // namespace sotto
