// The memory of an optimizer step as its kernels see it: slots that a run binds, scratch copies of
// scalars and of per-tensor state, and the operands that many kernels share.
#pragma once

#include <cstdint>
#include <span>
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

// Tensors that kernels take at once which follow each other over the same memory: of one parameter
// group, in the order of registration.
struct TensorBatch {
  uint64_t first_block = 0, blocks = 0;  // of block sums: from those of the first tensor on
  std::vector<NormRange> ranges;         // per tensor; blocks count from first_block
  std::vector<Piece> pieces;
};

class StepOperands {
 public:
  explicit StepOperands(const StepShape& shape);

  PlanBuilder& builder() { return b_; }
  StepSlots& slots() { return slots_; }
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
  OperandRef state_step_operand();

  uint32_t valid() const { return valid_; }  // kNoSlot: nothing is masked
  // What a step updates of these pieces: those of tensors that are not frozen.
  std::vector<Piece> updated(std::vector<Piece> pieces) const;
  // The tensors that have elements and are not frozen, each in one batch.
  std::vector<TensorBatch> batches() const;
  bool frozen(uint32_t tensor) const {
    return !shape_.frozen.empty() && tensor < shape_.frozen.size() && shape_.frozen[tensor] != 0;
  }
  // A list of scratch memory for all tensors.
  uint32_t scratch_list(Dtype type);

  // Numbers of the groups, of the type that the kernel reads.
  template <class T = GroupScalars>
  OperandRef scalars_operand() {
    return scalars_of(kScalarsType<T>);
  }
  // Elements that take part; absent: all of them, which is so in mode compat. begin: the flat
  // element that is the first one for the kernel.
  OperandRef valid_operand(Access access = Access::kRead, uint64_t begin = 0) const;
  // What an average is multiplied with before it is used, in either mode.
  OperandRef mask_operand() const;
  OperandRef coefficient_operand(const GradientStage& stage) const;
  OperandRef states_operand(Access access) const;
  OperandRef steps_operand(Access access) const;
  // What kernels of numbers per tensor read of blocks that all tensors have, and their argument.
  static OperandRef blocks_operand(uint32_t slot, const TensorBatch& batch);
  TensorArgs tensor_args(const TensorBatch& batch, bool average);

  // From now on kernels work on a copy of the per-tensor state, which keep_states writes back if
  // `word` says so: for steps that change it before the decision.
  void copy_states();
  void keep_states(uint32_t word);

  // Kernels that write parameters or state: only if `word` says so.
  static KernelOptions committing(uint32_t word);

 protected:
  OperandRef step_scalar(uint64_t offset);  // a member of StepScalars
  // Scratch memory for some tensors, one after the other, and of so many bytes at least.
  struct ScratchList {
    uint32_t list = kNoSlot, flat = kNoSlot;
  };
  // list: of an earlier call for other tensors, which these are added to; kNoSlot: a new one.
  ScratchList scratch_list(Dtype type, std::span<const uint32_t> tensors, uint64_t at_least = 0,
                           uint32_t list = kNoSlot);

 private:
  OperandRef scalars_of(const ScalarsType& type);
  // Scratch memory with what the host has written to a slot.
  uint32_t copied(uint32_t host, uint64_t bytes);
  uint64_t state_bytes() const;  // TensorStates, those of padding too

  StepShape shape_;
  PlanBuilder b_;
  StepSlots slots_;
  uint32_t step_scalars_ = kNoSlot;
  uint32_t tensor_steps_ = kNoSlot;
  uint32_t valid_ = kNoSlot;
  uint32_t bound_states_ = kNoSlot;
  uint32_t states_ = kNoSlot;  // what kernels use: the bound slot or its copy
};

// Pieces of tensors, in the order given.
std::vector<Piece> pieces_of(const CompressedLayout& layout, std::span<const uint32_t> tensors);
// Of all tensors.
std::vector<Piece> all_tensor_pieces(const CompressedLayout& layout);
// Of those that are compressed; padding: then of padding that is data.
std::vector<Piece> compressed_pieces(const CompressedLayout& layout, bool padding = false);
// 0 .. n - 1.
std::vector<uint32_t> tensor_numbers(uint64_t n);

}  // namespace sotto
