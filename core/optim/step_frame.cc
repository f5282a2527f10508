#include "core/optim/step_frame.h"

#include <cstddef>
#include <numeric>

#include "core/optim/state_arrays.h"
#include "core/plan/collectives.h"
#include "core/plan/layout.h"

namespace sotto {
namespace {

std::vector<uint64_t> counts_of(const CompressedLayout& layout) {
  std::vector<uint64_t> counts;
  for (const LayoutTensor& t : layout.tensors()) counts.push_back(t.count);
  return counts;
}

// 0 .. n - 1.
std::vector<uint32_t> numbers(size_t n) {
  std::vector<uint32_t> out(n);
  std::iota(out.begin(), out.end(), 0u);
  return out;
}

}  // namespace

StepPlan build_accumulation(const StepShape& shape, bool first) {
  StepFrame frame(shape);
  frame.accumulate(first, absent());
  return frame.take();
}

StepPlan build_dense_step(const StepShape& shape, const DenseUpdate& update, bool tensor_steps) {
  StepFrame frame(shape);
  const GradientStage gradient = frame.average_gradients();
  update(frame, gradient);
  return frame.finish(gradient.word, frame.worker_messages(), tensor_steps);
}

std::vector<Piece> pieces_of(const CompressedLayout& layout, std::span<const uint32_t> tensors) {
  std::vector<Piece> out;
  for (const uint32_t t : tensors) {
    const std::vector<Piece> pieces = layout.tensor_pieces(t);
    out.insert(out.end(), pieces.begin(), pieces.end());
  }
  return out;
}

std::vector<Piece> all_tensor_pieces(const CompressedLayout& layout) {
  return pieces_of(layout, numbers(layout.tensors().size()));
}

std::vector<Piece> compressed_pieces(const CompressedLayout& layout, bool padding) {
  std::vector<uint32_t> tensors =
      numbers(layout.tensors().size() + (padding ? layout.padding().size() : 0));
  std::erase_if(tensors, [&](uint32_t t) { return !layout.compressed(t); });
  return pieces_of(layout, tensors);
}

StepFrame::StepFrame(const StepShape& shape) : shape_(shape) {
  const CompressedLayout& layout = *shape.layout;
  const auto bytes_of = [&](Dtype type) {
    std::vector<uint64_t> bytes;
    for (const LayoutTensor& t : layout.tensors()) bytes.push_back(t.count * dtype_bytes(type));
    return bytes;
  };
  StepSlots& s = out_.slots;
  s.params = b_.bound_list(bytes_of(Dtype::kF32));
  s.grads = add_padded_list(b_, layout, shape.gradients);
  if (!shape.copied.empty()) s.copies = b_.bound_list(bytes_of(shape.copies));
  states_ = bound_states_ = array("tensor_states", state_bytes());
  b_.committed(s.params, layout.tensors().size());
  if (s.copies != kNoSlot) b_.committed(s.copies, layout.tensors().size());
  b_.committed(bound_states_);
  if (shape.masked) valid_ = bit_array("valid");
  const uint64_t scalar_bytes = shape.groups * sizeof(GroupScalars) + sizeof(StepScalars);
  s.scalars = b_.host(scalar_bytes);
  scalars_ = b_.scratch(scalar_bytes);
  b_.copy({scalars_, 0, scalar_bytes}, {s.scalars, 0, scalar_bytes});
  tensor_steps_ = b_.scratch(tensors() * sizeof(TensorStep));
  if (shape.accumulated) accumulate(false, step_scalar(offsetof(StepScalars, micro_factor)));
}

OperandRef StepFrame::step_scalar(uint64_t offset) const {
  return whole(scalars_, Access::kRead, shape_.groups * sizeof(GroupScalars) + offset, 8);
}

void StepFrame::accumulate(bool first, OperandRef factor) {
  out_.slots.sums = add_padded_list(b_, *shape_.layout, Dtype::kF32);
  const GradientStage given = caller_gradients();
  b_.kernel<kernels::Accumulate>({.x = given.operand(),
                                  .sum = list(out_.slots.sums, Access::kReadWrite, 32),
                                  .factor = factor},
                                 all_tensor_pieces(*shape_.layout),
                                 AccumulateArgs{given.type, first});
}

uint32_t StepFrame::array(std::string_view name, uint64_t bytes) {
  std::vector<ArrayBinding>& arrays = out_.slots.arrays;
  for (const ArrayBinding& a : arrays) {
    if (a.name == name) return a.elements;
  }
  return arrays.emplace_back(ArrayBinding{name, b_.bound(bytes)}).elements;
}

ArrayBinding StepFrame::moment(std::string_view name) {
  std::vector<ArrayBinding>& arrays = out_.slots.arrays;
  for (const ArrayBinding& a : arrays) {
    if (a.name == name) return a;
  }
  const CompressedLayout& layout = *shape_.layout;
  ArrayBinding out{name, b_.bound(state_element_bytes(layout, shape_.state))};
  b_.committed(out.elements);
  if (shape_.state == StateType::kFp8) {
    out.exponents = b_.bound(state_exponent_bytes(layout, shape_.state));
    b_.committed(out.exponents);
  }
  return arrays.emplace_back(out);
}

OperandRef StepFrame::moment_operand(std::string_view name) {
  return flat(moment(name).elements, Access::kReadWrite,
              static_cast<uint32_t>(state_type_bytes(shape_.state) * 8));
}

OperandRef StepFrame::exponents_operand(std::string_view name) {
  const uint32_t slot = moment(name).exponents;
  if (slot == kNoSlot) return absent();
  return blocks(slot, Access::kReadWrite, 8 * static_cast<uint32_t>(kStateBlocksPerNormBlock));
}

OperandRef StepFrame::state_step_operand() const {
  return step_scalar(offsetof(StepScalars, state_step));
}

OperandRef StepFrame::scalars_operand() const {
  return whole(scalars_, Access::kRead, 0, shape_.groups * sizeof(GroupScalars));
}

OperandRef StepFrame::valid_operand(Access access) const {
  if (!shape_.masked || shape_.compat) return absent();
  return whole(valid_, access, 0, shape_.layout->flat_elements() / 8);
}

OperandRef StepFrame::mask_operand() const {
  if (!shape_.masked) return absent();
  return whole(valid_, Access::kRead, 0, shape_.layout->flat_elements() / 8);
}

uint64_t StepFrame::state_bytes() const {
  return (tensors() + shape_.layout->padding().size()) * sizeof(TensorState);
}

OperandRef StepFrame::coefficient_operand(const GradientStage& stage) const {
  return stage.coefficient == kNoSlot ? absent() : whole(stage.coefficient, Access::kRead, 0, 4);
}

OperandRef StepFrame::states_operand(Access access) const {
  return whole(states_, access, 0, state_bytes());
}

OperandRef StepFrame::steps_operand(Access access) const {
  return whole(tensor_steps_, access, 0, tensors() * sizeof(TensorStep));
}

OperandRef StepFrame::blocks_operand(uint32_t slot, const NormRange& range) {
  return whole(slot, Access::kRead, range.first_block * 4, range.blocks * 4);
}

TensorArgs StepFrame::one_tensor(NormRange range, bool average) {
  range.first_block = 0;  // of the operand
  return {b_.keep_array(std::span<const NormRange>(&range, 1)), 1, average};
}

void StepFrame::copy_states() {
  const uint64_t bytes = state_bytes();
  states_ = b_.scratch(bytes);
  b_.copy({states_, 0, bytes}, {bound_states_, 0, bytes});
}

void StepFrame::keep_states(uint32_t word) {
  const uint64_t bytes = state_bytes();
  b_.copy({bound_states_, 0, bytes}, {states_, 0, bytes}, committing(word));
}

KernelOptions StepFrame::committing(uint32_t word) {
  KernelOptions options;
  options.phase = Phase::kCommitting;
  options.predicate = {word, 0, kCommit};
  return options;
}

// Norm of the gradients (`norm`), or only the flags; shared with the other ranks (`exchange`); clip
// coefficient and word, which takes part in an earlier one.
GradientStage StepFrame::clip_and_decide(GradientStage stage, bool exchange, bool norm,
                                         uint32_t flags) {
  const CompressedLayout& layout = *shape_.layout;
  const uint64_t n_blocks = norm ? layout.tensor_blocks() : 0;
  const uint32_t block_sums = b_.scratch(std::max<uint64_t>(1, n_blocks) * 4);
  if (norm) {
    b_.kernel<kernels::SumSquares>(
        {.x = stage.operand(), .sums = blocks(block_sums, Access::kWrite)},
        all_tensor_pieces(layout), SourceArgs{stage.type});
  }
  const uint32_t world = exchange ? static_cast<uint32_t>(shape_.size) : 1;
  const uint64_t own = exchange ? static_cast<uint64_t>(shape_.rank) : 0;
  norm_messages_ = b_.scratch(world * kNormMessageBytes);
  norm_message_count_ = world;
  b_.kernel<kernels::NormMessage>(
      {.sums = whole(block_sums, Access::kRead, 0, n_blocks * 4),
       .flags = flags == kNoSlot ? absent() : whole(flags, Access::kRead, 0, 4),
       .message =
           whole(norm_messages_, Access::kWrite, own * kNormMessageBytes, kNormMessageBytes)},
      {}, BlocksArgs{n_blocks});
  if (exchange) {
    emit_message_exchange(b_, shape_.rank, shape_.size, norm_messages_, kNormMessageBytes,
                          b_.next_round());
  }
  const uint32_t coefficient = b_.scratch(4);
  const uint32_t norm_value = b_.scratch(8);
  const bool scaled = shape_.loss_scaled && !stage.unscaled;
  const uint32_t prior = stage.word;
  stage.word = b_.scratch(4);
  b_.kernel<kernels::ClipCoefficient>(
      {.messages = whole(norm_messages_, Access::kRead, 0, world * kNormMessageBytes),
       .coefficient = whole(coefficient, Access::kWrite, 0, 4),
       .norm = whole(norm_value, Access::kWrite, 0, 8),
       .word = whole(stage.word, Access::kWrite, 0, 4),
       .unscale = scaled ? step_scalar(offsetof(StepScalars, unscale)) : absent(),
       .prior = prior == kNoSlot ? absent() : whole(prior, Access::kRead, 0, 4)},
      {}, ClipArgs{shape_.clip, world, kSkipNonfinite});
  if (shape_.clip > 0 || scaled) stage.coefficient = coefficient;
  if (norm) norm_ = norm_value;
  return stage;
}

StepFrame::ScratchList StepFrame::scratch_list(Dtype type, std::span<const uint32_t> tensors) {
  const std::vector<LayoutTensor>& all = shape_.layout->tensors();
  const uint64_t element = dtype_bytes(type);
  uint64_t bytes = 0;
  for (const uint32_t t : tensors) bytes += all[t].count * element;
  ScratchList out;
  out.flat = b_.scratch(std::max<uint64_t>(1, bytes));
  out.list = add_padded_list(b_, *shape_.layout, type);
  uint64_t offset = 0;
  for (const uint32_t t : tensors) {
    b_.alias(out.list + t, out.flat, offset);
    offset += all[t].count * element;
  }
  return out;
}

uint32_t StepFrame::scratch_list(Dtype type) { return scratch_list(type, numbers(tensors())).list; }

void StepFrame::convert(uint32_t from, uint32_t to, const ConvertArgs& args,
                        std::span<const uint32_t> tensors, const KernelOptions& options) {
  const auto bits = [](Dtype type) { return static_cast<uint32_t>(dtype_bytes(type) * 8); };
  b_.kernel<kernels::Convert>({.x = list(from, Access::kRead, bits(args.from)),
                               .y = list(to, Access::kWrite, bits(args.to))},
                              pieces_of(*shape_.layout, tensors), args, options);
}

GradientStage StepFrame::caller_gradients() const {
  GradientStage stage;
  stage.list = out_.slots.grads;
  stage.type = shape_.gradients;
  return stage;
}

// This rank's gradients where the caller has them, or their mean over micro-batches.
GradientStage StepFrame::local_stage() const {
  if (!shape_.accumulated) return caller_gradients();
  GradientStage stage;
  stage.list = out_.slots.sums;
  stage.own = true;
  return stage;
}

GradientStage StepFrame::average_gradients() {
  // Every rank holds the whole average: if its norm is wanted, a NaN shows in it on all ranks
  // alike, and nothing has to be exchanged. Otherwise the rank that reduces a chunk flags it, and
  // the flags are exchanged.
  const bool norm = shape_.clip > 0 || shape_.size == 1;
  if (shape_.size == 1) return clip_and_decide(local_stage(), false, true, kNoSlot);
  if (shape_.codec && shape_.layout->instances() > 0) {
    const GradientStage stage = compressed_average();
    return shape_.clip > 0 ? clip_and_decide(stage, false, true, kNoSlot) : stage;
  }
  uint32_t flags = kNoSlot;
  if (!norm) {
    flags = b_.scratch(4);
    b_.fill({flags, 0, 4}, 0);
  }
  return clip_and_decide(average(numbers(tensors()), flags), !norm, norm, flags);
}

GradientStage StepFrame::average(const std::vector<uint32_t>& tensors, uint32_t flags) {
  const FlatLayout dense = FlatLayout::concatenated(counts_of(*shape_.layout), tensors);
  const bool scaled = shape_.prescale != 1 || shape_.postscale != 1;
  const GradientStage local = local_stage();
  uint32_t summands = local.list;
  if (local.type != shape_.wire || shape_.prescale != 1) {
    summands = scratch_list(shape_.wire, tensors).list;
    convert(local.list, summands, {local.type, shape_.wire, shape_.prescale}, tensors);
  }
  const ScratchList averages = scratch_list(shape_.wire, tensors);
  FlatReduceRequest reduce;
  reduce.rank = shape_.rank;
  reduce.size = shape_.size;
  reduce.layout = &dense;
  reduce.dtype = shape_.wire;
  reduce.op = scaled ? ReduceOp::kSum : ReduceOp::kMean;
  reduce.in_list = summands;
  reduce.out_flat = averages.flat;
  reduce.flags = flags;
  reduce.round = b_.next_round();
  reduce.segment_bytes = shape_.segment_bytes;
  emit_flat_all_reduce(b_, reduce);
  GradientStage stage;
  stage.list = averages.list;
  stage.type = shape_.wire;
  if (shape_.postscale != 1) {  // the product is not rounded to 16 bits again
    stage.list = scratch_list(Dtype::kF32, tensors).list;
    stage.type = Dtype::kF32;
    convert(averages.list, stage.list, {shape_.wire, stage.type, shape_.postscale}, tensors);
  }
  stage.own = stage.type == Dtype::kF32;
  return stage;
}

// Error feedback is in units of the gradients themselves, so that it outlives a change of the loss
// scale.
GradientStage StepFrame::compressed_average() {
  const GradientStage local = local_stage();
  GradientStage stage;
  stage.own = stage.unscaled = true;
  stage.list = scratch_list(Dtype::kF32);
  uint32_t in = local.list;
  if (local.type != Dtype::kF32 || shape_.loss_scaled) {
    in = scratch_list(Dtype::kF32);  // not the averages: an undo reads it
    b_.kernel<kernels::Accumulate>(
        {.x = local.operand(),
         .sum = list(in, Access::kWrite, 32),
         .factor = shape_.loss_scaled ? step_scalar(offsetof(StepScalars, unscale)) : absent()},
        all_tensor_pieces(*shape_.layout), AccumulateArgs{local.type, true});
  }
  CompressedMeanRequest r{shape_.rank, shape_.layout, *shape_.codec, in, stage.list};
  r.valid = valid_;
  r.segment_bytes = shape_.segment_bytes;
  const CompressedMean mean = emit_compressed_mean(b_, r);
  out_.slots.codec = mean.slots;
  worker_messages_ = {mean.exchange.worker_messages, 0, shape_.layout->message_bytes()};
  stage.word = mean.exchange.gate;
  return stage;
}

std::vector<Piece> StepFrame::updated(std::vector<Piece> pieces) const {
  std::erase_if(pieces, [this](const Piece& p) { return frozen(p.tensor); });
  return pieces;
}

GradientStage StepFrame::local_gradients(Decide decide) {
  const bool together = shape_.clip > 0 || shape_.loss_scaled || decide == Decide::kTogether;
  if (together || decide == Decide::kAlways)
    return clip_and_decide(local_stage(), together && shape_.size > 1, true, kNoSlot);
  return local_stage();
}

// 16-bit copies of the parameters for the model, at the end of the step.
void StepFrame::write_copies(uint32_t word) {
  std::vector<uint32_t> tensors = shape_.copied;
  std::erase_if(tensors, [this](uint32_t t) { return frozen(t); });
  if (tensors.empty()) return;
  convert(out_.slots.params, out_.slots.copies, {Dtype::kF32, shape_.copies, 1}, tensors,
          committing(word));
}

uint32_t StepFrame::decide_alone(uint32_t flags, uint32_t prior) {
  const uint32_t nothing = b_.scratch(1);
  const uint32_t message = b_.scratch(4);
  b_.kernel<kernels::NormFinish>({.sums = whole(nothing, Access::kRead, 0, 0),
                                  .counts = whole(nothing, Access::kRead, 0, 0),
                                  .scales = whole(nothing, Access::kWrite, 0, 0),
                                  .message = whole(message, Access::kWrite, 0, 4),
                                  .flags = whole(flags, Access::kReadWrite, 0, 4)},
                                 {}, NormArgs{nullptr, 0, ScaleKind::kL2});
  const uint32_t word = b_.scratch(4);
  b_.kernel<kernels::Gate>(
      {.messages = whole(message, Access::kRead, 0, 4),
       .prior = prior == kNoSlot ? absent() : whole(prior, Access::kRead, 0, 4),
       .word = whole(word, Access::kWrite, 0, 4)},
      {}, GateArgs{4, 1, kSkipNonfinite});
  return word;
}

void StepFrame::count_valid(uint32_t counts, uint64_t n, std::vector<Piece> pieces) {
  b_.fill({counts, 0, n * 8}, 0);
  b_.kernel<kernels::CountValid>(
      {.valid = valid_operand(), .counts = whole(counts, Access::kReadWrite, 0, n * 8)},
      std::move(pieces), NoArgs{});
}

void StepFrame::count_valid_of_instances() {
  const CompressedLayout& layout = *shape_.layout;
  const auto of_chunk = [&](uint32_t chunk, std::vector<Piece>* out) {
    for (Piece& piece : layout.worker_pieces(chunk)) {
      if (piece.tensor == kNoTensor) continue;
      piece.block = piece.scale;
      out->push_back(piece);
    }
  };
  std::vector<Piece> worker, server;
  for (uint32_t k = 0; k < layout.ranks(); ++k) of_chunk(k, &worker);
  of_chunk(static_cast<uint32_t>(shape_.rank), &server);
  count_valid(out_.slots.codec.worker_counts, layout.instances(), std::move(worker));
  count_valid(out_.slots.codec.server_counts, layout.instances(), std::move(server));
}

StepPlan StepFrame::take() {
  out_.plan = b_.take();
  return std::move(out_);
}

StepPlan StepFrame::finish(uint32_t word, Region worker_messages, bool tensor_steps) {
  write_copies(word);
  StepVerdict& v = out_.verdict;
  uint64_t at = 16;
  v.norm_messages = at;
  v.norm_message_count = norm_message_count_;
  at += norm_message_count_ * kNormMessageBytes;
  v.worker_messages = at;
  v.worker_message_count = worker_messages.slot == kNoSlot ? 0 : static_cast<uint32_t>(shape_.size);
  if (worker_messages.slot != kNoSlot) at += (worker_messages.bytes + 7) / 8 * 8;
  v.tensor_steps = at;
  v.tensor_step_count = tensor_steps ? tensors() : 0;
  at += v.tensor_step_count * sizeof(TensorStep);
  v.bytes = at;
  const uint32_t host = b_.host(at);
  b_.set_verdict(host, word);
  if (norm_ != kNoSlot) {
    b_.copy({host, v.norm, 8}, {norm_, 0, 8});
  } else {
    v.norm = 0;
  }
  if (norm_message_count_ > 0) {
    const uint64_t bytes = norm_message_count_ * kNormMessageBytes;
    b_.copy({host, v.norm_messages, bytes}, {norm_messages_, 0, bytes});
  }
  if (worker_messages.slot != kNoSlot) {
    b_.copy({host, v.worker_messages, worker_messages.bytes}, worker_messages);
  }
  if (tensor_steps && tensors() > 0) {
    const uint64_t bytes = tensors() * sizeof(TensorStep);
    b_.copy({host, v.tensor_steps, bytes}, {tensor_steps_, 0, bytes});
  }
  return take();
}

}  // namespace sotto
