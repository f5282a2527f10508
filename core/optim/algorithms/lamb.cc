#include "core/optim/algorithms/lamb.h"

#include <algorithm>
#include <cmath>

namespace sotto {
namespace {

// Of tensors in a shared buffer: whole cache lines, so that vectors and thread blocks read and
// write them as they do tensors of the caller's.
constexpr uint64_t kDirectionAlignment = 128;

// Where the first pass leaves the direction of each tensor for the second: one slot per tensor;
// returns the first. Averages of this run are overwritten, if they are float32. Otherwise batches
// share a buffer with room for the largest; the caller's gradients are only read.
uint32_t direction_list(StepFrame& frame, const GradientStage& gradient,
                        std::span<const TensorBatch> batches) {
  if (gradient.own) return gradient.list;
  PlanBuilder& b = frame.builder();
  std::vector<uint64_t> bytes;
  for (const LayoutTensor& t : frame.shape().layout->tensors()) bytes.push_back(t.count * 4);
  const uint32_t first = b.bound_list(bytes);
  std::vector<uint64_t> places(bytes.size());
  uint64_t largest = 4;
  for (const TensorBatch& batch : batches) {
    uint64_t end = 0;
    for (const NormRange& range : batch.ranges) {
      places[range.tensor] = end;
      end += (bytes[range.tensor] + kDirectionAlignment - 1) / kDirectionAlignment *
             kDirectionAlignment;
    }
    largest = std::max(largest, end);
  }
  const uint32_t shared = b.scratch(largest);
  for (const TensorBatch& batch : batches) {
    for (const NormRange& range : batch.ranges)
      b.alias(first + range.tensor, shared, places[range.tensor]);
  }
  return first;
}

void emit_lamb(StepFrame& frame, const GradientStage& gradient, bool average) {
  PlanBuilder& b = frame.builder();
  const uint32_t params = frame.slots().params;
  const uint32_t m = frame.moment("m").elements, v = frame.moment("v").elements;
  const uint64_t block_bytes = std::max<uint64_t>(1, frame.shape().layout->tensor_blocks()) * 4;
  const uint32_t p_blocks = b.scratch(block_bytes);
  const uint32_t u_blocks = b.scratch(block_bytes);
  std::vector<TensorBatch> batches = frame.batches();
  const uint32_t directions = direction_list(frame, gradient, batches);
  const KernelOptions commit = StepFrame::committing(gradient.word);
  for (TensorBatch& batch : batches) {
    b.kernel<kernels::LambMoments>({.g = gradient.operand(),
                                    .m = flat(m, Access::kReadWrite, 32),
                                    .v = flat(v, Access::kReadWrite, 32),
                                    .p = list(params, Access::kRead, 32),
                                    .p_sums = blocks(p_blocks, Access::kWrite),
                                    .u_sums = blocks(u_blocks, Access::kWrite),
                                    .scalars = frame.scalars_operand<LambGroupScalars>(),
                                    .clip = frame.coefficient_operand(gradient),
                                    .valid = frame.valid_operand(),
                                    .u = list(directions, Access::kWrite, 32)},
                                   batch.pieces, SourceArgs{gradient.type}, commit);
    b.kernel<kernels::LambScalars>({.p_sums = StepFrame::blocks_operand(p_blocks, batch),
                                    .u_sums = StepFrame::blocks_operand(u_blocks, batch),
                                    .scalars = frame.scalars_operand<LambGroupScalars>(),
                                    .states = frame.states_operand(Access::kReadWrite),
                                    .steps = frame.steps_operand(Access::kReadWrite)},
                                   {}, frame.tensor_args(batch, average), commit);
    b.kernel<kernels::LambUpdate>({.u = list(directions, Access::kRead, 32),
                                   .p = list(params, Access::kReadWrite, 32),
                                   .steps = frame.steps_operand(Access::kRead)},
                                  std::move(batch.pieces), NoArgs{}, commit);
  }
}

}  // namespace

StepPlan build_lamb_step(const StepShape& shape, bool average) {
  const auto update = [average](StepFrame& frame, const GradientStage& gradient) {
    emit_lamb(frame, gradient, average);
  };
  return build_dense_step(shape, update, true);
}

void write_lamb_scalars(const OptimizerParams& p, uint64_t t, ScalarsRef scalars) {
  auto* s = scalars.as<LambGroupScalars>();
  if (s == nullptr) return;
  const auto step = static_cast<double>(t);
  const double correction1 = p.bias_correction ? 1.0 - std::pow(p.beta1, step) : 1.0;
  const double correction2 = p.bias_correction ? 1.0 - std::pow(p.beta2, step) : 1.0;
  s->lamb_lr = s->lr * (p.bias_correction ? std::sqrt(correction2) / correction1 : 1.0);
  s->max_coeff = p.lamb.max_coeff;
  s->min_coeff = p.lamb.min_coeff;
  s->coeff_beta = p.factor.coeff_beta;
  s->eps_inside_sqrt = p.eps_inside_sqrt ? 1 : 0;
}

std::span<const std::string_view> Lamb::settable() const {
  static constexpr std::string_view kNames[] = {"lr",  "weight_decay", "beta1",    "beta2",
                                                "eps", "max_coeff",    "min_coeff"};
  return kNames;
}

StepPlan Lamb::build(const StepVariant&, const StepShape& shape) const {
  return build_lamb_step(shape, false);
}

void Lamb::write_scalars(const StepVariant& variant, size_t group, ScalarsRef s) const {
  Algorithm::write_scalars(variant, group, s);
  write_lamb_scalars(d_.groups.params(group), d_.next_t(), s);
}

std::unique_ptr<Algorithm> make_lamb(OptimizerData& data) { return std::make_unique<Lamb>(data); }

}  // namespace sotto
