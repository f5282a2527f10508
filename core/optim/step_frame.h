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
  StepFrame(const StepFrame&) = delete;
  StepFrame& operator=(const StepFrame&) = delete;

  // The sums of micro-batches, with the gradients of this one.
  void accumulate(bool first, OperandRef factor);

  // What reads gradients comes behind one of these, which are nothing where all are there. A codec
  // asks for them itself, by what it is given here (null: all are there).
  void need_all() { need_inputs(inputs_.size()); }
  bool state_copied() const { return late() != nullptr; }  // CompressedRequest::state_copied
  const LateInputs* late() const { return shape().average.late == nullptr ? nullptr : &late_; }

  // Averages gradients over ranks, in full precision or with the shape's codec; clips; decides.
  GradientStage average_gradients();
  // Gradients in float32 times the factor (absent: 1): the same ones, or scratch memory.
  uint32_t in_float32(const GradientStage& gradients, OperandRef factor);
  // Who met what is not finite, if a codec averages; else no bytes.
  Region worker_messages() const { return worker_messages_; }
  // Averages those of some tensors, more than one rank. flags: raised by the rank whose share of
  // the sums is not finite; kNoSlot: not looked for.
  GradientStage average(const std::vector<uint32_t>& tensors, uint32_t flags);
  // Steps without a full-precision average: the mean over ranks of the norms of local gradients, if
  // clipping is on. Otherwise ranks that have to decide do so alone.
  GradientStage local_gradients(Decide decide);
  // The word from the flags that kernels have raised on any rank and an earlier word (kNoSlot:
  // none). alike: they are the same on all ranks, which exchange nothing.
  uint32_t decide_by_flags(uint32_t flags, uint32_t prior, bool alike = false);

  // counts[i] = valid elements of the pieces with `block` == i, i < n.
  void count_valid(uint32_t counts, uint64_t n, std::vector<Piece> pieces);
  // Worker and server counts of the compressor, whose slots are there.
  void count_valid_of_instances();

  // The word that committing kernels go by: with late gradients, that of all ranks behind the last
  // one.
  uint32_t settle(uint32_t word);

  // Ends the plan with the decision in `word`, which was settled. Regions with no bytes are left
  // out of the verdict.
  StepPlan finish(uint32_t word, Region worker_messages, bool tensor_steps);
  // The plan as it is, without a decision.
  StepPlan take();

 private:
  // Slots of tensors that are averaged in parts.
  struct AverageLists {
    uint32_t summands = kNoSlot, averages = kNoSlot, scaled = kNoSlot;
  };
  using Tensors = std::span<const uint32_t>;

  void need_inputs(size_t count);
  // Emits something for tensors as soon as they are there: now for those that are.
  void on_arrival(std::function<void(Tensors)> emit);
  void average_part(Tensors tensors, uint32_t flags, AverageLists* lists);
  GradientStage caller_gradients();
  GradientStage compressed_average();
  GradientStage local_stage();
  GradientStage clip_and_decide(GradientStage stage, bool exchange, bool norm, uint32_t flags);
  void convert(uint32_t from, uint32_t to, const ConvertArgs& args,
               std::span<const uint32_t> tensors, const KernelOptions& options = {});
  void write_copies(uint32_t word);

  std::vector<std::vector<uint32_t>> inputs_;  // tensors of each; one with all if none is late
  std::vector<uint32_t> input_of_;             // by tensor
  size_t arrived_ = 0;                         // inputs
  std::vector<std::function<void(Tensors)>> on_arrival_;
  LateInputs late_;
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
