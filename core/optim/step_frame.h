// What the plans of all optimizer steps have in common: bound slots, scalars, gradient norm and
// clipping, the verdict.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "core/optim/step_plan.h"

namespace sotto {

// Gradients ready for the update, and the decision so far.
struct GradientStage {
  uint32_t list = kNoSlot;  // first of the tensors' slots
  Dtype type = Dtype::kF32;
  bool own = false;                // float32 in memory of the run, which a step may overwrite
  uint32_t coefficient = kNoSlot;  // clip coefficient; kNoSlot: none
  uint32_t word = kNoSlot;         // kCommit if all gradients are finite; kNoSlot: not known yet
  bool unscaled = false;           // the loss scale is out of them already

  // As the source operand of a kernel.
  OperandRef operand() const {
    return sotto::list(list, Access::kRead, static_cast<uint32_t>(dtype_bytes(type) * 8));
  }
};

// Whether a step needs a decision before it encodes.
enum class Decide : uint8_t {
  kIfNeeded,  // only for clipping; the encoder flags what is not finite
  kAlways,
  kTogether,  // so that every rank knows who met what is not finite
};

class StepFrame {
 public:
  explicit StepFrame(const StepShape& shape);

  PlanBuilder& builder() { return b_; }
  StepSlots& slots() { return out_.slots; }
  uint32_t scalars() const { return scalars_; }  // scratch copy of GroupScalars
  const StepShape& shape() const { return shape_; }
  uint64_t tensors() const { return shape_.layout->tensors().size(); }

  // The slot of an array of the state, which the step's run binds.
  uint32_t array(std::string_view name, uint64_t bytes);
  // Of float32, or of bits, for every element of the flat space.
  uint32_t flat_array(std::string_view name) {
    return array(name, shape_.layout->flat_elements() * 4);
  }
  uint32_t bit_array(std::string_view name) {
    return array(name, shape_.layout->flat_elements() / 8);
  }
  // Of the shape's type of state: momentum or variance, which only a step that commits writes.
  ArrayBinding moment(std::string_view name);
  // Such an array as operands of an update; exponents: absent if there are none.
  OperandRef moment_operand(std::string_view name);
  OperandRef exponents_operand(std::string_view name);
  OperandRef state_step_operand() const;

  uint32_t valid() const { return valid_; }  // kNoSlot: nothing is masked

  // The sums of micro-batches, with the gradients of this one.
  void accumulate(bool first, OperandRef factor);

  // Averages gradients over ranks, in full precision or with the shape's codec; clips; decides.
  GradientStage average_gradients();
  // Who met what is not finite, if a codec averages; else no bytes.
  Region worker_messages() const { return worker_messages_; }
  // Averages those of some tensors, more than one rank. flags: raised by the rank whose share of
  // the sums is not finite; kNoSlot: nobody looks.
  GradientStage average(const std::vector<uint32_t>& tensors, uint32_t flags);
  // What a step updates of these pieces: those of tensors that are not frozen.
  std::vector<Piece> updated(std::vector<Piece> pieces) const;
  bool frozen(uint32_t tensor) const {
    return !shape_.frozen.empty() && tensor < shape_.frozen.size() && shape_.frozen[tensor] != 0;
  }
  // Steps without a full-precision average: the mean over ranks of the norms of local gradients, if
  // clipping is on. Otherwise ranks that have to decide do so alone.
  GradientStage local_gradients(Decide decide);
  // One rank: the word from the flags that an encoder raised and an earlier word (kNoSlot: none).
  uint32_t decide_alone(uint32_t flags, uint32_t prior);

  // counts[i] = valid elements of the pieces with `block` == i, i < n.
  void count_valid(uint32_t counts, uint64_t n, std::vector<Piece> pieces);
  // A list of scratch memory for all tensors.
  uint32_t scratch_list(Dtype type);

  // Worker and server counts of the compressor, whose slots are there.
  void count_valid_of_instances();

  // Operands that many kernels share.
  OperandRef scalars_operand() const;
  // Elements that take part; absent: all of them, which is so in mode compat.
  OperandRef valid_operand(Access access = Access::kRead) const;
  // What an average is multiplied with before it is used, in either mode.
  OperandRef mask_operand() const;
  OperandRef coefficient_operand(const GradientStage& stage) const;
  OperandRef states_operand(Access access) const;
  OperandRef steps_operand(Access access) const;
  // What kernels of a single tensor read of blocks that all tensors have, and their argument.
  static OperandRef blocks_operand(uint32_t slot, const NormRange& range);
  TensorArgs one_tensor(NormRange range, bool average);

  // From now on kernels work on a copy of the per-tensor state, which keep_states writes back if
  // `word` says so: for steps that change it before the decision.
  void copy_states();
  void keep_states(uint32_t word);

  // Kernels that write parameters or state: only if `word` says so.
  static KernelOptions committing(uint32_t word);

  // Ends the plan with the decision in `word`. Regions with no bytes are left out of the verdict.
  StepPlan finish(uint32_t word, Region worker_messages, bool tensor_steps);
  // The plan as it is, without a decision.
  StepPlan take();

 private:
  GradientStage caller_gradients() const;
  GradientStage compressed_average();
  GradientStage local_stage() const;
  OperandRef step_scalar(uint64_t offset) const;  // a member of StepScalars
  GradientStage clip_and_decide(GradientStage stage, bool exchange, bool norm, uint32_t flags);
  // Scratch memory for some tensors, one after the other.
  struct ScratchList {
    uint32_t list = kNoSlot, flat = kNoSlot;
  };
  ScratchList scratch_list(Dtype type, std::span<const uint32_t> tensors);
  void convert(uint32_t from, uint32_t to, const ConvertArgs& args,
               std::span<const uint32_t> tensors, const KernelOptions& options = {});
  uint64_t state_bytes() const;  // TensorStates, those of padding too
  void write_copies(uint32_t word);

  StepShape shape_;
  PlanBuilder b_;
  StepPlan out_;
  uint32_t scalars_ = kNoSlot;
  uint32_t tensor_steps_ = kNoSlot;
  uint32_t valid_ = kNoSlot;
  uint32_t bound_states_ = kNoSlot;
  uint32_t states_ = kNoSlot;  // what kernels use: the bound slot or its copy
  uint32_t norm_ = kNoSlot;    // double
  uint32_t norm_messages_ = kNoSlot;
  uint32_t norm_message_count_ = 0;
  Region worker_messages_;
};

// A step whose gradient is averaged and then used: one piece averages, `update` is the other.
// tensor_steps: the update leaves a TensorStep of each tensor.
using DenseUpdate = std::function<void(StepFrame&, const GradientStage&)>;
StepPlan build_dense_step(const StepShape& shape, const DenseUpdate& update, bool tensor_steps);

// Pieces of tensors, in the order given.
std::vector<Piece> pieces_of(const CompressedLayout& layout, std::span<const uint32_t> tensors);
// Of all tensors.
std::vector<Piece> all_tensor_pieces(const CompressedLayout& layout);
// Of those that are compressed; padding: then of padding that is data.
std::vector<Piece> compressed_pieces(const CompressedLayout& layout, bool padding = false);

}  // namespace sotto
