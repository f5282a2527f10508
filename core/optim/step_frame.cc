#include "core/optim/step_frame.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "core/plan/collectives.h"
#include "core/plan/flat_reduce.h"
#include "core/plan/layout.h"

namespace sotto {
namespace {

std::vector<uint64_t> counts_of(const CompressedLayout& layout) {
  std::vector<uint64_t> counts;
  for (const LayoutTensor& t : layout.tensors()) counts.push_back(t.count);
  return counts;
}

}  // namespace

StepPlan build_accumulation(const StepShape& shape, bool first) {
  StepFrame frame(shape);
  frame.accumulate(first, absent());
  return frame.take();
}

StepPlan build_dense_step(const StepShape& shape, const DenseUpdate& update, bool tensor_steps) {
  StepFrame frame(shape);
  GradientStage gradient = frame.average_gradients();
  gradient.word = frame.settle(gradient.word);
  update(frame, gradient);
  return frame.finish(gradient.word, frame.worker_messages(), tensor_steps);
}

StepFrame::StepFrame(const StepShape& shape) : StepOperands(shape) {
  if (shape.average.late == nullptr) {
    inputs_ = {tensor_numbers(tensors())};
    arrived_ = 1;
  } else {
    inputs_ = shape.average.late->inputs;
    input_of_.resize(tensors());
    for (size_t i = 0; i < inputs_.size(); ++i) {
      for (const uint32_t t : inputs_[i]) input_of_[t] = static_cast<uint32_t>(i);
    }
    late_.last = [this](std::span<const Piece> pieces) {
      uint32_t last = 0;
      for (const Piece& p : pieces) {
        if (p.tensor < input_of_.size()) last = std::max(last, input_of_[p.tensor]);
      }
      return last;
    };
    late_.need = [this](std::span<const Piece> pieces) { need_inputs(late_.last(pieces) + 1); };
  }
  if (shape.accumulated) accumulate(false, step_scalar(offsetof(StepScalars, micro_factor)));
}

void StepFrame::accumulate(bool first, OperandRef factor) {
  slots().sums = add_padded_list(builder(), *shape().layout, Dtype::kF32);
  const GradientStage given = caller_gradients();
  on_arrival([this, given, factor, first](Tensors tensors) {
    builder().kernel<kernels::Accumulate>(
        {.x = given.operand(), .sum = list(slots().sums, Access::kReadWrite, 32), .factor = factor},
        pieces_of(*shape().layout, tensors), AccumulateArgs{given.type, first});
  });
}

void StepFrame::on_arrival(std::function<void(Tensors)> emit) {
  for (size_t i = 0; i < arrived_; ++i) emit(inputs_[i]);
  on_arrival_.push_back(std::move(emit));
}

void StepFrame::need_inputs(size_t count) {
  for (; arrived_ < count; ++arrived_) {
    std::vector<uint32_t> late;
    for (const uint32_t t : inputs_[arrived_]) late.push_back(slots().grads + t);
    builder().await(late);
    for (const auto& emit : on_arrival_) emit(inputs_[arrived_]);
  }
}

// Norm of the gradients (`norm`), or only the flags; shared with the other ranks (`exchange`); clip
// coefficient and word, which takes part in an earlier one.
GradientStage StepFrame::clip_and_decide(GradientStage stage, bool exchange, bool norm,
                                         uint32_t flags) {
  const CompressedLayout& layout = *shape().layout;
  if (norm) need_all();
  const uint64_t n_blocks = norm ? layout.tensor_blocks() : 0;
  const uint32_t block_sums = builder().scratch(std::max<uint64_t>(1, n_blocks) * 4);
  if (norm) {
    builder().kernel<kernels::SumSquares>(
        {.x = stage.operand(), .sums = blocks(block_sums, Access::kWrite)},
        all_tensor_pieces(layout), SourceArgs{stage.type});
  }
  const uint32_t world = exchange ? static_cast<uint32_t>(shape().size) : 1;
  const uint64_t own = exchange ? static_cast<uint64_t>(shape().rank) : 0;
  norm_messages_ = builder().scratch(world * kNormMessageBytes);
  // Flags of averages tell which rank has reduced them, not whose gradients they are.
  norm_message_count_ = flags == kNoSlot ? world : 0;
  builder().kernel<kernels::NormMessage>(
      {.sums = whole(block_sums, Access::kRead, 0, n_blocks * 4),
       .flags = flags == kNoSlot ? absent() : whole(flags, Access::kRead, 0, 4),
       .message =
           whole(norm_messages_, Access::kWrite, own * kNormMessageBytes, kNormMessageBytes)},
      {}, BlocksArgs{n_blocks});
  if (exchange) {
    emit_message_exchange(builder(), shape().rank, shape().size, shape().average.levels,
                          norm_messages_, kNormMessageBytes, builder().next_round());
  }
  const uint32_t coefficient = builder().scratch(4);
  const uint32_t norm_value = builder().scratch(8);
  const bool scaled = shape().loss_scaled && !stage.unscaled;
  const uint32_t prior = stage.word;
  stage.word = builder().scratch(4);
  builder().kernel<kernels::ClipCoefficient>(
      {.messages = whole(norm_messages_, Access::kRead, 0, world * kNormMessageBytes),
       .coefficient = whole(coefficient, Access::kWrite, 0, 4),
       .norm = whole(norm_value, Access::kWrite, 0, 8),
       .word = whole(stage.word, Access::kWrite, 0, 4),
       .unscale = scaled ? step_scalar(offsetof(StepScalars, unscale)) : absent(),
       .prior = prior == kNoSlot ? absent() : whole(prior, Access::kRead, 0, 4)},
      {}, ClipArgs{shape().clip, world, kSkipNonfinite});
  if (shape().clip > 0 || scaled) stage.coefficient = coefficient;
  if (norm) norm_ = norm_value;
  return stage;
}

void StepFrame::convert(uint32_t from, uint32_t to, const ConvertArgs& args,
                        std::span<const uint32_t> tensors, const KernelOptions& options) {
  const auto bits = [](Dtype type) { return static_cast<uint32_t>(dtype_bytes(type) * 8); };
  builder().kernel<kernels::Convert>({.x = list(from, Access::kRead, bits(args.from)),
                                      .y = list(to, Access::kWrite, bits(args.to))},
                                     pieces_of(*shape().layout, tensors), args, options);
}

GradientStage StepFrame::caller_gradients() {
  GradientStage stage;
  stage.list = slots().grads;
  stage.type = shape().gradients;
  return stage;
}

// This rank's gradients where the caller has them, or their mean over micro-batches.
GradientStage StepFrame::local_stage() {
  if (!shape().accumulated) return caller_gradients();
  GradientStage stage;
  stage.list = slots().sums;
  stage.own = true;
  return stage;
}

GradientStage StepFrame::average_gradients() {
  // Every rank holds the whole average: if its norm is wanted, a NaN shows in it on all ranks
  // alike, and nothing has to be exchanged. Otherwise the rank that reduces a chunk flags it, and
  // the flags are exchanged.
  const bool norm = shape().clip > 0 || shape().size == 1;
  if (shape().size == 1) return clip_and_decide(local_stage(), false, true, kNoSlot);
  if (shape().average.codec && shape().layout->instances() > 0) {
    const GradientStage stage = compressed_average();
    return shape().clip > 0 ? clip_and_decide(stage, false, true, kNoSlot) : stage;
  }
  uint32_t flags = kNoSlot;
  if (!norm) {
    flags = builder().scratch(4);
    builder().fill({flags, 0, 4}, 0);
  }
  return clip_and_decide(average(tensor_numbers(tensors()), flags), !norm, norm, flags);
}

GradientStage StepFrame::average(const std::vector<uint32_t>& tensors, uint32_t flags) {
  AverageLists lists;
  if (late() == nullptr) {
    average_part(tensors, flags, &lists);
  } else {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      std::vector<uint32_t> part;
      std::ranges::copy_if(inputs_[i], std::back_inserter(part),
                           [&](uint32_t t) { return std::ranges::binary_search(tensors, t); });
      need_inputs(i + 1);
      if (!part.empty()) average_part(part, flags, &lists);
    }
  }
  GradientStage stage;
  stage.list = lists.scaled != kNoSlot ? lists.scaled : lists.averages;
  stage.type = lists.scaled != kNoSlot ? Dtype::kF32 : shape().average.wire;
  stage.own = stage.type == Dtype::kF32;
  return stage;
}

void StepFrame::average_part(Tensors tensors, uint32_t flags, AverageLists* lists) {
  const FlatLayout dense =
      FlatLayout::concatenated(counts_of(*shape().layout), {tensors.begin(), tensors.end()});
  const bool scaled = shape().average.prescale != 1 || shape().average.postscale != 1;
  const GradientStage local = local_stage();
  FlatReduceRequest reduce;
  reduce.rank = shape().rank;
  reduce.size = shape().size;
  reduce.layout = &dense;
  reduce.dtype = shape().average.wire;
  reduce.op = scaled ? ReduceOp::kSum : ReduceOp::kMean;
  reduce.flags = flags;
  reduce.round = builder().next_round();
  reduce.segment_bytes = shape().sizes.segment_bytes;
  reduce.held = shape().sizes.held;
  reduce.native = shape().average.native;
  reduce.levels = shape().average.levels;
  const uint64_t bytes = flat_reduce_bytes(reduce);
  const bool converts = local.type != reduce.dtype || shape().average.prescale != 1;
  reduce.in_place = converts && packs_in_place(reduce);
  ScratchList summands{local.list};
  if (converts) {
    uint32_t* const list = reduce.in_place ? &lists->averages : &lists->summands;
    summands = scratch_list(reduce.dtype, tensors, bytes, *list);
    *list = summands.list;
    convert(local.list, summands.list, {local.type, reduce.dtype, shape().average.prescale},
            tensors);
  }
  const ScratchList averages =
      reduce.in_place ? summands : scratch_list(reduce.dtype, tensors, bytes, lists->averages);
  lists->averages = averages.list;
  reduce.in_list = summands.list;
  reduce.out_flat = averages.flat;
  emit_flat_all_reduce(builder(), reduce);
  if (shape().average.postscale == 1) return;
  // The product is not rounded to 16 bits again.
  lists->scaled = scratch_list(Dtype::kF32, tensors, 0, lists->scaled).list;
  convert(averages.list, lists->scaled,
          {shape().average.wire, Dtype::kF32, shape().average.postscale}, tensors);
}

uint32_t StepFrame::in_float32(const GradientStage& gradients, OperandRef factor) {
  if (gradients.type == Dtype::kF32 && factor.slot == kNoSlot) return gradients.list;
  const uint32_t out = scratch_list(Dtype::kF32);  // not the averages: an undo reads it
  on_arrival([this, gradients, out, factor](Tensors tensors) {
    builder().kernel<kernels::Accumulate>(
        {.x = gradients.operand(), .sum = list(out, Access::kWrite, 32), .factor = factor},
        pieces_of(*shape().layout, tensors), AccumulateArgs{gradients.type, true});
  });
  return out;
}

// Error feedback is in units of the gradients themselves, so that it outlives a change of the loss
// scale.
GradientStage StepFrame::compressed_average() {
  const GradientStage local = local_stage();
  GradientStage stage;
  stage.own = stage.unscaled = true;
  stage.list = scratch_list(Dtype::kF32);
  const uint32_t in = in_float32(
      local, shape().loss_scaled ? step_scalar(offsetof(StepScalars, unscale)) : absent());
  CompressedMeanRequest r{shape().rank, shape().layout, *shape().average.codec,
                          in,           stage.list,     shape().average.levels};
  r.valid = valid();
  r.segment_bytes = shape().sizes.segment_bytes;
  r.late = late();
  r.state_copied = state_copied();
  const CompressedMean mean = emit_compressed_mean(builder(), r);
  slots().codec = mean.slots;
  worker_messages_ = {mean.exchange.worker_messages, 0, shape().layout->message_bytes()};
  stage.word = mean.exchange.gate;
  return stage;
}

GradientStage StepFrame::local_gradients(Decide decide) {
  const bool together = shape().clip > 0 || shape().loss_scaled || decide == Decide::kTogether;
  if (together || decide == Decide::kAlways)
    return clip_and_decide(local_stage(), together && shape().size > 1, true, kNoSlot);
  if (shape().size == 1) need_all();
  return local_stage();
}

uint32_t StepFrame::settle(uint32_t word) {
  if (late() == nullptr) return word;
  need_all();
  const bool observes = shape().average.late->observes;
  slots().end = emit_round_end(builder(), shape().rank, shape().size, shape().average.levels,
                               observes ? tensors() * sizeof(uint32_t) : 0);
  const uint32_t settled = builder().scratch(4);
  decide_round(builder(), slots().end, word, settled);
  return settled;
}

// 16-bit copies of the parameters for the model, at the end of the step.
void StepFrame::write_copies(uint32_t word) {
  std::vector<uint32_t> tensors = shape().copies.tensors;
  std::erase_if(tensors, [this](uint32_t t) { return frozen(t); });
  if (tensors.empty()) return;
  convert(slots().params, slots().copies, {Dtype::kF32, shape().copies.type, 1}, tensors,
          committing(word));
}

uint32_t StepFrame::decide_by_flags(uint32_t flags, uint32_t prior, bool alike) {
  const uint32_t ranks = alike ? 1 : static_cast<uint32_t>(shape().size);
  const uint64_t own = ranks == 1 ? 0 : uint64_t{4} * static_cast<uint32_t>(shape().rank);
  const uint32_t nothing = builder().scratch(1);
  const uint32_t messages = builder().scratch(uint64_t{4} * ranks);
  builder().kernel<kernels::NormFinish>({.sums = whole(nothing, Access::kRead, 0, 0),
                                         .counts = whole(nothing, Access::kRead, 0, 0),
                                         .scales = whole(nothing, Access::kWrite, 0, 0),
                                         .message = whole(messages, Access::kWrite, own, 4),
                                         .flags = whole(flags, Access::kReadWrite, 0, 4)},
                                        {}, NormArgs{nullptr, 0, ScaleKind::kL2});
  if (ranks > 1) {
    emit_message_exchange(builder(), shape().rank, shape().size, shape().average.levels, messages,
                          4, builder().next_round());
  }
  const uint32_t word = builder().scratch(4);
  builder().kernel<kernels::Gate>(
      {.messages = whole(messages, Access::kRead, 0, uint64_t{4} * ranks),
       .prior = prior == kNoSlot ? absent() : whole(prior, Access::kRead, 0, 4),
       .word = whole(word, Access::kWrite, 0, 4)},
      {}, GateArgs{4, ranks, kSkipNonfinite});
  return word;
}

void StepFrame::count_valid(uint32_t counts, uint64_t n, std::vector<Piece> pieces) {
  builder().fill({counts, 0, n * 8}, 0);
  builder().kernel<kernels::CountValid>(
      {.valid = valid_operand(), .counts = whole(counts, Access::kReadWrite, 0, n * 8)},
      std::move(pieces), NoArgs{});
}

void StepFrame::count_valid_of_instances() {
  if (!shape().serves()) return;
  const CompressedLayout& layout = *shape().layout;
  const uint32_t me = server_of(shape().average.levels, shape().rank);
  const auto of_chunk = [&](uint32_t chunk, std::vector<Piece>* out) {
    for (Piece& piece : worker_chunk(layout, chunk)) {
      if (piece.tensor == kNoTensor) continue;
      piece.block = piece.scale;
      out->push_back(piece);
    }
  };
  std::vector<Piece> worker, server;
  const uint32_t first = me / layout.servers_per_shard() * layout.servers_per_shard();
  for (uint32_t k = 0; k < layout.servers_per_shard(); ++k) of_chunk(first + k, &worker);
  of_chunk(me, &server);
  count_valid(slots().codec.worker_counts, layout.instances(), std::move(worker));
  count_valid(slots().codec.server_counts, layout.instances(), std::move(server));
}

StepPlan StepFrame::take() { return {builder().take(), std::move(slots()), verdict_}; }

StepPlan StepFrame::finish(uint32_t word, Region worker_messages, bool tensor_steps) {
  write_copies(word);
  std::vector<std::pair<uint32_t, uint64_t>> places;  // slots, and where they lie in the outcome
  uint64_t end = 0;
  const auto place = [&](uint32_t slot, uint64_t bytes) {
    places.emplace_back(slot, end);
    return std::exchange(end, end + (bytes + 7) / 8 * 8);
  };
  place(word, 4);
  StepVerdict& v = verdict_;
  if (norm_ != kNoSlot) v.norm = place(norm_, 8);
  if (norm_message_count_ > 0) {
    v.norm_message_count = norm_message_count_;
    v.norm_messages = place(norm_messages_, norm_message_count_ * kNormMessageBytes);
  }
  if (worker_messages.slot != kNoSlot) {
    v.worker_message_count = static_cast<uint32_t>(shape().size);
    v.worker_messages = place(worker_messages.slot, worker_messages.bytes);
  }
  if (tensor_steps) {
    v.tensor_step_count = tensors();
    v.tensor_steps =
        place(steps_operand(Access::kRead).slot, v.tensor_step_count * sizeof(TensorStep));
  }
  if (late() != nullptr) {
    const RoundEnd& round = slots().end;
    v.round_message_bytes = round.messages.bytes;
    v.round_messages = place(round.messages.slot, round.messages.bytes);
    if (round.order != kNoSlot) {
      v.first_order_bytes = round.first_order.bytes;
      v.first_order = place(round.first_order.slot, round.first_order.bytes);
    }
  }
  const uint32_t outcome = builder().scratch(end);
  for (const auto& [slot, offset] : places) builder().alias(slot, outcome, offset);
  builder().set_verdict(builder().host(end), word, {outcome, 0, end});
  return take();
}

}  // namespace sotto
