#include "core/optim/algorithms/compressed_momentum.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/optim/algorithms/adam.h"

namespace sotto {
namespace {

enum : uint8_t { kWarmUp, kFirst, kFloats, kBits };

}  // namespace

CompressedStep::CompressedStep(const CompressedStepRequest& request)
    : r_(request),
      frame_(request.shape),
      b_(frame_.builder()),
      layout_(*request.shape.layout),
      s_(frame_.slots()),
      den_(frame_.flat_array("den")) {
  for (uint32_t t = 0; t < frame_.tensors(); ++t) {
    if (!layout_.compressed(t) && layout_.tensors()[t].count != 0) uncompressed_.push_back(t);
  }
  messages_ = layout_.message_bytes();
  if (r_.momentum_bits) {
    s_.current_bits = b_.bound(layout_.compressed_elements() / 8);
    s_.current_messages = b_.bound(messages_);
    b_.committed(s_.current_bits, 2);
  }
}

StepPlan CompressedStep::build() {
  bind();
  const bool alone = r_.shape.alone();
  if (!alone) {
    s_.codec = add_onebit_slots(b_, layout_, r_.shape.serves(), frame_.state_copied());
    if (s_.codec.server != kNoSlot) b_.committed(s_.codec.server);
    if (!r_.shape.compat) s_.codec.valid = frame_.valid();
  }
  if (r_.first) {
    frame_.copy_states();
    start_stage();
  }
  gradient_ =
      alone && r_.shape.size > 1
          ? frame_.average_gradients()
          : frame_.local_gradients(uncompressed_.empty() ? Decide::kIfNeeded : Decide::kTogether);
  if (alone) {
    const uint32_t word = frame_.settle(local_momentum());
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
  if (r_.shape.compat) masked_momentum();
  const uint32_t word = frame_.settle(result.gate);
  update(word);
  update_uncompressed(average, word);
  if (r_.shape.compat) keep_momentum(word);
  if (r_.first) frame_.keep_states(word);
  return frame_.finish(word, {result.worker_messages, 0, messages_}, true);
}

// Everything that depends on the state at the switch.
void CompressedStep::start_stage() {
  kernels::FreezeVarianceOperands<OperandRef> operands{
      .v = flat(frame_.moment("v").elements, Access::kRead, 32),
      .den = flat(den_, Access::kWrite, 32),
      .valid = frame_.valid_operand(Access::kReadWrite),
      .scalars = frame_.scalars_operand()};
  freeze(&operands);
  b_.kernel<kernels::FreezeVariance>(operands, compressed_pieces(layout_),
                                     FreezeArgs{r_.mask_zero_variance});
  if (!r_.shape.alone() && !r_.shape.compat) frame_.count_valid_of_instances();
  after_freeze();
}

CompressedStep::Momentum CompressedStep::old_momentum(uint64_t begin) {
  if (!r_.momentum_bits) return {.floats = flat(m(), Access::kRead, 32, 0, begin * 4)};
  return {.bits = whole(s_.current_bits, Access::kRead, begin / 8,
                        (layout_.compressed_elements() - begin) / 8),
          .messages = whole(s_.current_messages, Access::kRead, 0, messages_)};
}

CompressedRequest CompressedStep::exchange_request() {
  CompressedRequest e;
  e.rank = r_.shape.rank;
  e.layout = &layout_;
  e.scale = r_.scale;
  e.slots = s_.codec;
  if (gradient_.word != kNoSlot) e.prior = {gradient_.word, 0, kCommit};
  e.segment_bytes = r_.shape.sizes.segment_bytes;
  e.late = frame_.late();
  e.state_copied = frame_.state_copied();
  // The momentum is the same on all ranks: that of a host's mean gradient is the host's mean.
  e.levels = r_.shape.average.levels;
  if (e.levels != nullptr) e.host_in = frame_.in_float32(gradient_, absent());
  e.encode = [this](std::vector<Piece> pieces, const EncodeTarget& to) {
    GradientStage g = gradient_;
    if (to.in != kNoSlot) {
      g.list = to.in;
      g.type = Dtype::kF32;
    }
    const EncodeArgs args{0, r_.scale, false, g.type};
    b_.kernel_with_undo<kernels::OnebitLambEncode>(
        {.g = g.operand(),
         .m = old_momentum(to.shard_begin),
         .to = {.c = flat(s_.codec.worker, Access::kReadWrite, 32),
                .old_scales = scales(s_.codec.worker_scale, Access::kRead),
                .bits = flat(to.bits, Access::kWrite, 1),
                .sums = blocks(to.blocks, Access::kWrite),
                .valid = frame_.valid_operand(Access::kRead, to.shard_begin),
                .flags = whole(to.flags, Access::kReadWrite, to.flags_offset, 4)},
         .scalars = frame_.scalars_operand(),
         .states = frame_.states_operand(Access::kRead),
         .clip = frame_.coefficient_operand(gradient_)},
        std::move(pieces), args, !frame_.state_copied());
  };
  return e;
}

// One rank: the momentum itself, and the decision.
uint32_t CompressedStep::local_momentum() {
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
  return frame_.decide_by_flags(flags, gradient_.word, true);
}

// Mode compat: masks are applied here, and then all elements take part again, so the momentum
// cannot stay bits.
void CompressedStep::masked_momentum() {
  const uint32_t floats = b_.scratch(std::max<uint64_t>(1, layout_.compressed_elements() * 4));
  b_.kernel<kernels::MomentumFromBits>({.bits = new_bits(),
                                        .messages = new_messages(),
                                        .states = frame_.states_operand(Access::kRead),
                                        .m = flat(floats, Access::kWrite, 32),
                                        .valid = frame_.mask_operand()},
                                       compressed_pieces(layout_, true), NoArgs{});
  new_m_ = floats;
}

void CompressedStep::keep_momentum(uint32_t word) {
  const uint64_t bytes = layout_.compressed_elements() * 4;
  b_.copy({m(), 0, bytes}, {new_m_, 0, bytes}, StepFrame::committing(word));
}

OperandRef CompressedStep::new_bits() const {
  return whole(s_.codec.bits, Access::kRead, 0, layout_.compressed_elements() / 8);
}
OperandRef CompressedStep::new_messages() const {
  return whole(s_.codec.messages, Access::kRead, 0, messages_);
}
CompressedStep::Momentum CompressedStep::new_momentum() const {
  if (new_m_ != kNoSlot) return {.floats = flat(new_m_, Access::kRead, 32)};
  return {.bits = new_bits(), .messages = new_messages()};
}

// Groups whose variance is never frozen.
void CompressedStep::update_uncompressed(const GradientStage& average, uint32_t word) {
  if (uncompressed_.empty()) return;
  emit_adam(frame_, average, pieces_of(layout_, uncompressed_), word);
}

void CompressedStep::emit_update(std::vector<Piece> pieces, uint32_t word) {
  b_.kernel<kernels::MomentumUpdate>({.m = new_momentum(),
                                      .den = flat(den_, Access::kRead, 32),
                                      .p = list(s_.params, Access::kReadWrite, 32),
                                      .valid = frame_.valid_operand(),
                                      .scalars = frame_.scalars_operand(),
                                      .steps = frame_.steps_operand(Access::kRead),
                                      .states = frame_.states_operand(Access::kRead)},
                                     std::move(pieces), NoArgs{}, StepFrame::committing(word));
}

// ---- the algorithm ----

std::vector<StateArraySpec> CompressedMomentum::arrays() const {
  return {moment("m"), moment("v"), floats("den", false)};
}

Status CompressedMomentum::freeze(const std::vector<uint8_t>& flags) {
  SOTTO_TRY(OneBitAlgorithm::freeze(flags));
  momentum_bits_ = false;
  return ok_status();
}

StepVariant CompressedMomentum::next() const {
  if (!compressed_) return {.number = kWarmUp};
  if (!stage_started_) return {.number = kFirst, .traffic = 1, .begins_stage = true};
  return {.number = momentum_bits_ ? kBits : kFloats, .traffic = 1};
}

StepPlan CompressedMomentum::build(const StepVariant& variant, const StepShape& shape) const {
  if (variant.number == kWarmUp) return build_warm_up(shape);
  return build_compressed({shape, d_.codec->scale, variant.number == kBits,
                           variant.number == kFirst, masks_zero_variance()});
}

void CompressedMomentum::committed(const StepVariant& variant) {
  if (variant.number != kWarmUp) {
    stage_started_ = true;
    if (d_.alone()) return;
    d_.compressed.flip();
    momentum_bits_ = !d_.compat();
  } else if (late_stage(d_.step + 1)) {
    compressed_ = true;
    stage_started_ = false;
    momentum_bits_ = false;
  }
}

std::string_view CompressedMomentum::stage() const {
  return compressed_ ? "compressed" : "full precision";
}

void CompressedMomentum::report_settings(nlohmann::ordered_json* report) const {
  (*report)["freeze_step"] = d_.groups[0].freeze.freeze_step;
}

// From {bits, messages, scaling coefficients}: the same values, so the next step gives the same
// bits.
Status CompressedMomentum::momentum_to_floats() {
  if (!momentum_bits_) return ok_status();
  const std::vector<Piece> pieces = compressed_pieces(*d_.layout);
  const kernels::MomentumFromBitsOperands<Operand> operands{
      .bits = {d_.compressed.current_bits().data()},
      .messages = {d_.compressed.current_messages().data()},
      .states = {d_.arrays.data("tensor_states")},
      .m = {d_.arrays.data("m")},
      .valid = {d_.masked ? d_.arrays.data("valid") : nullptr}};
  KernelCall call = call_of<kernels::MomentumFromBits>(operands);
  call.pieces = pieces;
  return d_.access.run_and_wait(call);
}

Status CompressedMomentum::describe(StateErrors errors, OptimSnapshot* s) {
  s->set_flag("compressed", compressed_);
  return OneBitAlgorithm::describe(errors, s);
}

std::vector<TensorState> CompressedMomentum::tensor_states(const OptimSnapshot& s) const {
  if (starts_again(s)) return std::vector<TensorState>(d_.parameters.size());
  return OneBitAlgorithm::tensor_states(s);
}

Status CompressedMomentum::restore(const OptimSnapshot& s) {
  SOTTO_TRY(OneBitAlgorithm::restore(s));
  compressed_ = late_stage(s.step);
  momentum_bits_ = false;
  return ok_status();
}

Status CompressedMomentum::read_arrays(const ArrayReader&, OptimSnapshot* s) const {
  s->set_flag("compressed", late_stage(s->step));
  return ok_status();
}

}  // namespace sotto
