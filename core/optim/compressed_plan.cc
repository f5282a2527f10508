// Compressed steps of 1-bit Adam (specification 5.3) and 1-bit LAMB (7.4).
#include "core/optim/step_frame.h"
#include "core/optim/step_plan.h"

namespace sotto {
namespace {

// The step, part by part.
class CompressedStep {
 public:
  explicit CompressedStep(const CompressedStepRequest& request)
      : r_(request),
        frame_(request.shape),
        b_(frame_.builder()),
        layout_(*request.shape.layout),
        s_(frame_.slots()) {
    s_.den = b_.bound(layout_.flat_elements() * 4);
    if (r_.lamb) {
      s_.vf = b_.bound(layout_.flat_elements() * 4);
      if (!r_.first) b_.committed(s_.vf);
      s_.tensor_counts = b_.bound(frame_.tensors() * 8);
    }
    for (uint32_t t = 0; t < frame_.tensors(); ++t) {
      if (!layout_.compressed(t) && layout_.tensors()[t].count != 0) uncompressed_.push_back(t);
    }
    messages_ = layout_.message_bytes();
    if (r_.momentum_bits) {
      s_.old_bits = b_.bound(layout_.compressed_elements() / 8);
      s_.old_messages = b_.bound(messages_);
      b_.committed(s_.old_bits, 2);
    }
  }

  StepPlan build() {
    const bool alone = r_.shape.size == 1;
    if (!alone) {
      s_.codec = add_onebit_slots(b_, layout_);
      b_.committed(s_.codec.server);
      if (!r_.shape.compat) s_.codec.valid = s_.valid;
    }
    if (r_.first) {
      frame_.copy_states();
      start_stage(alone);
    }
    gradient_ =
        frame_.local_gradients(uncompressed_.empty() ? Decide::kIfNeeded : Decide::kTogether);
    if (alone) {
      const uint32_t word = local_momentum();
      update(word);
      update_uncompressed(gradient_, word);
      keep_momentum(word);
      if (r_.first) frame_.keep_states(word);
      return frame_.finish(word, {}, true);
    }
    CompressedRequest exchange = exchange_request();
    GradientStage average;
    if (!uncompressed_.empty()) {
      exchange.worker_flags = add_worker_flags(b_, layout_);
      average = frame_.average(uncompressed_, exchange.worker_flags);
      average.coefficient = gradient_.coefficient;
    }
    const CompressedResult result = emit_compressed_all_reduce(b_, exchange);
    emit_onebit_scale_undo(b_, exchange);
    if (r_.shape.compat) masked_momentum();
    update(result.gate);
    update_uncompressed(average, result.gate);
    if (r_.shape.compat) keep_momentum(result.gate);
    if (r_.first) frame_.keep_states(result.gate);
    return frame_.finish(result.gate, {result.worker_messages, 0, messages_}, true);
  }

 private:
  // First compressed step: everything that depends on the state at the switch. Doing it again
  // changes nothing.
  void start_stage(bool alone) {
    const uint64_t block_bytes = std::max<uint64_t>(1, layout_.tensor_blocks()) * 4;
    const uint32_t m_blocks = r_.lamb ? b_.scratch(block_bytes) : kNoSlot;
    b_.kernel<kernels::FreezeVariance>(
        {.m = r_.lamb ? flat(s_.m, Access::kRead, 32) : absent(),
         .v = flat(s_.v, Access::kRead, 32),
         .vf = r_.lamb ? flat(s_.vf, Access::kWrite, 32) : absent(),
         .den = flat(s_.den, Access::kWrite, 32),
         .valid = frame_.valid_operand(Access::kReadWrite),
         .sums = r_.lamb ? blocks(m_blocks, Access::kWrite) : absent(),
         .scalars = frame_.scalars_operand()},
        compressed_pieces(layout_), FreezeArgs{r_.mask_zero_variance});
    if (!alone && !r_.shape.compat) frame_.count_valid_of_instances();
    if (!r_.lamb) return;
    std::vector<Piece> by_tensor = all_tensor_pieces(layout_);
    for (Piece& piece : by_tensor) piece.block = piece.tensor;
    frame_.count_valid(s_.tensor_counts, frame_.tensors(), std::move(by_tensor));
    const std::vector<NormRange> ranges = layout_.tensor_ranges();
    b_.kernel<kernels::OnebitLambScaling>(
        {.sums = whole(m_blocks, Access::kRead, 0, block_bytes),
         .counts = whole(s_.tensor_counts, Access::kRead, 0, frame_.tensors() * 8),
         .states = frame_.states_operand(Access::kReadWrite)},
        {},
        ScalingArgs{b_.keep_array(std::span<const NormRange>(ranges)), ranges.size(), r_.debias});
  }

  using Momentum = kernels::MomentumOperands<OperandRef>;
  Momentum old_momentum() const {
    if (!r_.momentum_bits) return {.floats = flat(s_.m, Access::kRead, 32)};
    return {.bits = whole(s_.old_bits, Access::kRead, 0, layout_.compressed_elements() / 8),
            .messages = whole(s_.old_messages, Access::kRead, 0, messages_)};
  }

  CompressedRequest exchange_request() {
    CompressedRequest e;
    e.rank = r_.shape.rank;
    e.layout = &layout_;
    e.scale = r_.scale;
    e.slots = s_.codec;
    if (gradient_.word != kNoSlot) e.prior = {gradient_.word, 0, kCommit};
    e.segment_bytes = r_.shape.segment_bytes;
    e.encode = [this](std::vector<Piece> pieces, const EncodeTarget& to) {
      const EncodeArgs args{to.bits_base, r_.scale, false, gradient_.type};
      b_.kernel_with_undo<kernels::OnebitLambEncode>(
          {.g = gradient_.operand(),
           .m = old_momentum(),
           .to = {.c = flat(s_.codec.worker, Access::kReadWrite, 32),
                  .old_scales = scales(s_.codec.worker_scale, Access::kRead),
                  .bits = flat(to.bits, Access::kWrite, 1, to.bits_base),
                  .sums = blocks(to.blocks, Access::kWrite),
                  .valid = frame_.valid_operand(),
                  .flags = whole(to.flags, Access::kReadWrite, to.flags_offset, 4)},
           .scalars = frame_.scalars_operand(),
           .states = frame_.states_operand(Access::kRead),
           .clip = frame_.coefficient_operand(gradient_)},
          std::move(pieces), args);
    };
    return e;
  }

  // One rank: the momentum itself, and the decision.
  uint32_t local_momentum() {
    new_m_ = b_.scratch(std::max<uint64_t>(1, layout_.compressed_elements() * 4));
    const uint32_t flags = b_.scratch(4);
    b_.fill({flags, 0, 4}, 0);
    b_.kernel<kernels::OnebitLambEncode>({.g = gradient_.operand(),
                                          .m = old_momentum(),
                                          .to = {.c = flat(new_m_, Access::kWrite, 32),
                                                 .valid = frame_.mask_operand(),
                                                 .flags = whole(flags, Access::kReadWrite, 0, 4)},
                                          .scalars = frame_.scalars_operand(),
                                          .states = frame_.states_operand(Access::kRead),
                                          .clip = frame_.coefficient_operand(gradient_)},
                                         compressed_pieces(layout_),
                                         EncodeArgs{0, r_.scale, true, gradient_.type});
    return frame_.decide_alone(flags, gradient_.word);
  }

  // Mode compat: masks are applied here, and then all elements take part again, so the momentum
  // cannot stay bits.
  void masked_momentum() {
    const uint32_t floats = b_.scratch(std::max<uint64_t>(1, layout_.compressed_elements() * 4));
    b_.kernel<kernels::MomentumFromBits>({.bits = new_bits(),
                                          .messages = new_messages(),
                                          .states = frame_.states_operand(Access::kRead),
                                          .m = flat(floats, Access::kWrite, 32),
                                          .valid = frame_.mask_operand()},
                                         compressed_pieces(layout_, true), NoArgs{});
    new_m_ = floats;
  }

  void keep_momentum(uint32_t word) {
    const uint64_t bytes = layout_.compressed_elements() * 4;
    b_.copy({s_.m, 0, bytes}, {new_m_, 0, bytes}, StepFrame::committing(word));
  }

  OperandRef new_bits() const {
    return whole(s_.codec.bits, Access::kRead, 0, layout_.compressed_elements() / 8);
  }
  OperandRef new_messages() const { return whole(s_.codec.messages, Access::kRead, 0, messages_); }
  Momentum new_momentum() const {
    if (new_m_ != kNoSlot) return {.floats = flat(new_m_, Access::kRead, 32)};
    return {.bits = new_bits(), .messages = new_messages()};
  }

  void update(uint32_t word) { r_.lamb ? update_lamb(word) : update_adam(word); }

  // One pass over all tensors with the group's learning rate as step size.
  void update_adam(uint32_t word) {
    const std::vector<NormRange> ranges = layout_.tensor_ranges();
    b_.kernel<kernels::StepSizes>(
        {.scalars = frame_.scalars_operand(), .steps = frame_.steps_operand(Access::kWrite)}, {},
        TensorArgs{b_.keep_array(std::span<const NormRange>(ranges)), ranges.size(), false});
    emit_update(frame_.updated(compressed_pieces(layout_)), word);
  }

  // Groups whose variance is never frozen.
  void update_uncompressed(const GradientStage& average, uint32_t word) {
    if (uncompressed_.empty()) return;
    frame_.adam_update(average, pieces_of(layout_, uncompressed_), word);
  }

  void emit_update(std::vector<Piece> pieces, uint32_t word) {
    b_.kernel<kernels::MomentumUpdate>({.m = new_momentum(),
                                        .den = flat(s_.den, Access::kRead, 32),
                                        .p = list(s_.params, Access::kReadWrite, 32),
                                        .valid = frame_.valid_operand(),
                                        .scalars = frame_.scalars_operand(),
                                        .steps = frame_.steps_operand(Access::kRead),
                                        .states = frame_.states_operand(Access::kRead)},
                                       std::move(pieces), NoArgs{}, StepFrame::committing(word));
  }

  // Passes A and B, tensor after tensor.
  void update_lamb(uint32_t word) {
    const uint64_t block_bytes = std::max<uint64_t>(1, layout_.tensor_blocks()) * 4;
    const uint32_t u0_blocks = b_.scratch(block_bytes);
    const uint32_t u_blocks = b_.scratch(block_bytes);
    const uint32_t maxima = b_.scratch(block_bytes);
    const std::vector<NormRange> ranges = layout_.tensor_ranges();
    const KernelOptions commit = StepFrame::committing(word);
    for (uint32_t t = 0; t < ranges.size(); ++t) {
      if (ranges[t].count == 0 || frame_.frozen(t)) continue;
      std::vector<Piece> pieces = layout_.tensor_pieces(t);
      b_.kernel<kernels::OnebitLambFactor>({.m = new_momentum(),
                                            .old = old_momentum(),
                                            .vf = flat(s_.vf, Access::kReadWrite, 32),
                                            .den = flat(s_.den, Access::kRead, 32),
                                            .p = list(s_.params, Access::kRead, 32),
                                            .valid = frame_.valid_operand(),
                                            .u0_sums = blocks(u0_blocks, Access::kWrite),
                                            .u_sums = blocks(u_blocks, Access::kWrite),
                                            .maxima = blocks(maxima, Access::kWrite),
                                            .scalars = frame_.scalars_operand(),
                                            .states = frame_.states_operand(Access::kRead)},
                                           pieces, NoArgs{}, commit);
      b_.kernel<kernels::OnebitLambScalars>(
          {.u0_sums = StepFrame::blocks_operand(u0_blocks, ranges[t]),
           .u_sums = StepFrame::blocks_operand(u_blocks, ranges[t]),
           .maxima = StepFrame::blocks_operand(maxima, ranges[t]),
           .scalars = frame_.scalars_operand(),
           .states = frame_.states_operand(Access::kReadWrite),
           .steps = frame_.steps_operand(Access::kReadWrite)},
          {}, frame_.one_tensor(ranges[t], false), commit);
      emit_update(std::move(pieces), word);
    }
  }

  CompressedStepRequest r_;
  StepFrame frame_;
  PlanBuilder& b_;
  const CompressedLayout& layout_;
  StepSlots& s_;
  GradientStage gradient_;
  std::vector<uint32_t> uncompressed_;  // tensors
  uint64_t messages_ = 0;
  uint32_t new_m_ = kNoSlot;  // one rank, compat: the new momentum as floats
};

}  // namespace

StepPlan build_compressed_step(const CompressedStepRequest& request) {
  return CompressedStep(request).build();
}

}  // namespace sotto
