// The compressed stage of 1-bit Adam (specification 5.3) and 1-bit LAMB (7.4): the variance is
// frozen, and the momentum is exchanged in one bit.
#pragma once

#include "core/codec/compressed.h"
#include "core/optim/algorithms/onebit.h"

namespace sotto {

struct CompressedStepRequest {
  StepShape shape;
  ScaleKind scale = ScaleKind::kL2;
  bool momentum_bits = false;  // m is {current bits, current messages, TensorState}; else floats
  bool first = false;          // the stage starts: what follows from the state is made first
  bool mask_zero_variance = false;  // first: elements with v = 0 leave the valid bits
};

// The plan of one step, in two pieces: exchange and update.
class CompressedStep {
 public:
  explicit CompressedStep(const CompressedStepRequest& request);
  virtual ~CompressedStep() = default;
  CompressedStep(const CompressedStep&) = delete;
  CompressedStep& operator=(const CompressedStep&) = delete;

  StepPlan build();

 protected:
  using Momentum = kernels::MomentumOperands<OperandRef>;

  // Binds arrays of its own.
  virtual void bind() {}
  // First step: what the kernel that freezes the variance reads and writes beside v, den and mask;
  // and what follows. Doing it again changes nothing.
  virtual void freeze(kernels::FreezeVarianceOperands<OperandRef>* /*operands*/) {}
  virtual void after_freeze() {}
  // Applies the new momentum to the compressed tensors.
  virtual void update(uint32_t word) = 0;

  // begin: the flat element that is the first one for the kernel.
  Momentum old_momentum(uint64_t begin = 0);
  Momentum new_momentum() const;
  // The update of some tensors, whose step sizes are there.
  void emit_update(std::vector<Piece> pieces, uint32_t word);
  uint32_t m() { return frame_.moment("m").elements; }
  uint64_t block_bytes() const { return std::max<uint64_t>(1, layout_.tensor_blocks()) * 4; }

  CompressedStepRequest r_;
  StepFrame frame_;
  PlanBuilder& b_;
  const CompressedLayout& layout_;
  StepSlots& s_;
  uint32_t den_ = kNoSlot;

 private:
  void start_stage();
  CompressedRequest exchange_request();
  uint32_t local_momentum();
  void masked_momentum();
  void keep_momentum(uint32_t word);
  void update_uncompressed(const GradientStage& average, uint32_t word);
  OperandRef new_bits() const;
  OperandRef new_messages() const;

  GradientStage gradient_;
  std::vector<uint32_t> uncompressed_;  // tensors
  uint64_t messages_ = 0;
  uint32_t new_m_ = kNoSlot;  // one rank, compat: the new momentum as floats
};

// Which step comes, and what the stage keeps.
class CompressedMomentum : public OneBitAlgorithm {
 public:
  using OneBitAlgorithm::OneBitAlgorithm;
  std::vector<StateArraySpec> arrays() const override;
  Status freeze(const std::vector<uint8_t>& flags) override;
  StepVariant next() const override;
  StepPlan build(const StepVariant& variant, const StepShape& shape) const override;
  void committed(const StepVariant& variant) override;
  bool late() const override { return compressed_; }
  std::string_view stage() const override;
  void report_settings(nlohmann::ordered_json* report) const override;
  Status describe(StateErrors errors, OptimSnapshot* s) override;
  Status restore(const OptimSnapshot& s) override;
  Status read_arrays(const ArrayReader& reader, OptimSnapshot* s) const override;

 protected:
  virtual StepPlan build_warm_up(const StepShape& shape) const = 0;
  virtual StepPlan build_compressed(const CompressedStepRequest& request) const = 0;
  bool late_after(uint64_t t) const override { return t >= d_.groups[0].freeze.freeze_step; }
  Status momentum_to_floats() override;
  std::vector<TensorState> tensor_states(const OptimSnapshot& s) const override;
  // Back in warm-up after a compressed stage: its coefficients start again.
  bool starts_again(const OptimSnapshot& s) const {
    return s.flag("compressed") && !late_stage(s.step);
  }

 private:
  bool compressed_ = false;
  bool momentum_bits_ = false;  // the codec's current result is the momentum
};

}  // namespace sotto
