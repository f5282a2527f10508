// What the plans of all optimizer steps have in common: gradients that are accumulated, averaged,
// clipped and decided about, model copies, the verdict.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/optim/step_operands.h"

namespace sotto {

// Whether a step needs a decision before it encodes.
enum class Decide : uint8_t {
  kIfNeeded,  // only for clipping; the encoder flags what is not finite
  kAlways,
  kTogether,  // so that every rank knows who met what is not finite
};

class StepFrame : public StepOperands {
 public:
  explicit StepFrame(const StepShape& shape);

  // The sums of micro-batches, with the gradients of this one.
  void accumulate(bool first, OperandRef factor);

  // Averages gradients over ranks, in full precision or with the shape's codec; clips; decides.
  GradientStage average_gradients();
  // Who met what is not finite, if a codec averages; else no bytes.
  Region worker_messages() const { return worker_messages_; }
  // Averages those of some tensors, more than one rank. flags: raised by the rank whose share of
  // the sums is not finite; kNoSlot: not looked for.
  GradientStage average(const std::vector<uint32_t>& tensors, uint32_t flags);
  // Steps without a full-precision average: the mean over ranks of the norms of local gradients, if
  // clipping is on. Otherwise ranks that have to decide do so alone.
  GradientStage local_gradients(Decide decide);
  // One rank: the word from the flags that an encoder raised and an earlier word (kNoSlot: none).
  uint32_t decide_alone(uint32_t flags, uint32_t prior);

  // counts[i] = valid elements of the pieces with `block` == i, i < n.
  void count_valid(uint32_t counts, uint64_t n, std::vector<Piece> pieces);
  // Worker and server counts of the compressor, whose slots are there.
  void count_valid_of_instances();

  // Ends the plan with the decision in `word`. Regions with no bytes are left out of the verdict.
  StepPlan finish(uint32_t word, Region worker_messages, bool tensor_steps);
  // The plan as it is, without a decision.
  StepPlan take();

 private:
  GradientStage caller_gradients();
  GradientStage compressed_average();
  GradientStage local_stage();
  GradientStage clip_and_decide(GradientStage stage, bool exchange, bool norm, uint32_t flags);
  void convert(uint32_t from, uint32_t to, const ConvertArgs& args,
               std::span<const uint32_t> tensors, const KernelOptions& options = {});
  void write_copies(uint32_t word);

  StepVerdict verdict_;
  uint32_t norm_ = kNoSlot;  // double
  uint32_t norm_messages_ = kNoSlot;
  uint32_t norm_message_count_ = 0;
  Region worker_messages_;
};

// A step whose gradient is averaged and then used: one piece averages, `update` is the other.
// tensor_steps: the update leaves a TensorStep of each tensor.
using DenseUpdate = std::function<void(StepFrame&, const GradientStage&)>;
StepPlan build_dense_step(const StepShape& shape, const DenseUpdate& update, bool tensor_steps);

}  // namespace sotto
