#include "core/optim/algorithms/zeroone_step.h"

#include "core/optim/step_frame.h"
#include "core/plan/flat_reduce.h"

namespace sotto {
namespace {

class ZeroOneStep {
 public:
  explicit ZeroOneStep(const ZeroOneRequest& request)
      : r_(request),
        frame_(request.shape),
        b_(frame_.builder()),
        layout_(*request.shape.layout),
        s_(frame_.slots()),
        m_(frame_.moment("m").elements),
        v_(frame_.moment("v").elements),
        pieces_(all_tensor_pieces(layout_)),
        messages_(layout_.message_bytes()) {
    if (!alone()) {
      s_.codec = add_onebit_slots(b_, layout_, r_.shape.serves(), frame_.state_copied());
      if (!r_.begin && s_.codec.server != kNoSlot) b_.committed(s_.codec.server);
      if (!compat()) s_.codec.valid = frame_.valid();
    }
    if (r_.own_masks) base_valid_ = frame_.bit_array("base_valid");
    if (r_.kind == ZeroOneUpdate::kCompressed) return;
    local_sum_ = frame_.flat_array("local_sum");
    den_ = frame_.flat_array("den");
    if (!compat()) anchor_ = frame_.flat_array("anchor");
    if (r_.begin) return;
    b_.committed(local_sum_);
    if (!compat()) b_.committed(anchor_);
  }

  StepPlan build() {
    if (r_.begin) begin();
    if (r_.refresh_mask || r_.begin) prepare();
    if (r_.kind == ZeroOneUpdate::kLocal) return local();
    const bool sync = r_.kind == ZeroOneUpdate::kSync;
    if (alone()) return sync ? sync_alone() : compressed_alone();
    gradient_ = frame_.local_gradients(Decide::kIfNeeded);
    if (sync && compat()) sum_in_place(kNoSlot);
    CompressedRequest e;
    e.levels = r_.shape.average.levels;
    if (e.levels != nullptr)
      e.host_in = sync ? sums_of_rank() : frame_.in_float32(gradient_, absent());
    e.rank = r_.shape.rank;
    e.layout = &layout_;
    e.scale = r_.scale;
    e.slots = s_.codec;
    if (gradient_.word != kNoSlot) e.prior = {gradient_.word, 0, kCommit};
    e.segment_bytes = r_.shape.sizes.segment_bytes;
    e.late = frame_.late();
    e.state_copied = frame_.state_copied();
    e.encode = [this, sync](std::vector<Piece> pieces, const EncodeTarget& to) {
      const bool host = to.in != kNoSlot;
      const OperandRef given = list(host ? to.in : sum_, Access::kRead, 32);
      if (!sync) {
        encode(host ? given : gradients(), host ? Dtype::kF32 : gradient_.type, coefficient(),
               std::move(pieces), to);
      } else if (host || compat()) {
        encode(given, Dtype::kF32, absent(), std::move(pieces), to);
      } else {
        encode_sync(std::move(pieces), to);
      }
    };
    const CompressedResult result = emit_compressed_all_reduce(b_, e);
    if (r_.begin && frame_.state_copied()) s_.codec.server = s_.codec.server_scale = kNoSlot;
    const uint32_t word = frame_.settle(result.gate);
    sync ? update_sync(word) : update_compressed(word);
    return frame_.finish(word, {result.worker_messages, 0, messages_}, false);
  }

 private:
  OperandRef state(uint32_t slot, Access access) const { return flat(slot, access, 32); }
  OperandRef gradients() const { return r_.gradients ? gradient_.operand() : absent(); }
  OperandRef coefficient() const { return frame_.coefficient_operand(gradient_); }
  OperandRef bits() const {
    return alone() ? absent() : whole(s_.codec.bits, Access::kRead, 0, layout_.flat_elements() / 8);
  }
  OperandRef messages() const {
    return alone() ? absent() : whole(s_.codec.messages, Access::kRead, 0, messages_);
  }
  bool alone() const { return r_.shape.alone(); }
  bool compat() const { return r_.shape.compat; }

  // What the state at the switch gives. Doing it again changes nothing.
  void begin() {
    const uint64_t flat_bytes = layout_.flat_elements() * 4;
    b_.fill({local_sum_, 0, flat_bytes}, 0);
    if (!compat()) {
      b_.kernel<kernels::Pack>(
          {.tensors = list(s_.params, Access::kRead, 32), .flat = state(anchor_, Access::kWrite)},
          pieces_, PackArgs{0, 4});
    }
    if (alone() || !r_.shape.serves()) return;
    b_.fill({s_.codec.worker, 0, layout_.shard_elements() * 4}, 0);
    b_.fill({s_.codec.worker_scale, 0, layout_.instances() * 4}, 0);
    // What is kept stays as it is until the step commits, with what servers have next.
    if (frame_.state_copied()) {
      s_.codec.server = b_.scratch(layout_.chunk_elements() * 4);
      s_.codec.server_scale = b_.scratch(layout_.instances() * 4);
    }
    b_.fill({s_.codec.server, 0, layout_.chunk_elements() * 4}, 0);
    b_.fill({s_.codec.server_scale, 0, layout_.instances() * 4}, 0);
  }

  // The mask, and the denominator where the variance is frozen.
  void prepare() {
    const bool frozen = r_.kind != ZeroOneUpdate::kCompressed;
    const bool renew = !r_.shape.valid.empty() && !compat();
    if (renew) {
      const Region valid{frame_.valid(), 0, layout_.flat_elements() / 8};
      r_.own_masks ? b_.copy(valid, {base_valid_, 0, valid.bytes}) : b_.fill(valid, 0xff);
    }
    b_.kernel<kernels::FreezeVariance>({.v = state(v_, Access::kRead),
                                        .den = frozen ? state(den_, Access::kWrite) : absent(),
                                        .valid = frame_.valid_operand(Access::kReadWrite),
                                        .scalars = frame_.scalars_operand()},
                                       pieces_, FreezeArgs{r_.mask_zero_variance});
    if (renew && !alone()) frame_.count_valid_of_instances();
  }

  // x: list of source elements of type `type`.
  void encode(OperandRef x, Dtype type, OperandRef coefficient, std::vector<Piece> pieces,
              const EncodeTarget& to) {
    const EncodeArgs args{0, r_.scale, false, type};
    b_.kernel_with_undo<kernels::OnebitEncode>(
        {.x = x, .to = encoder(to), .coefficient = coefficient}, std::move(pieces), args,
        !frame_.state_copied());
  }

  void encode_sync(std::vector<Piece> pieces, const EncodeTarget& to) {
    const EncodeArgs args{0, r_.scale, false, gradient_.type};
    b_.kernel_with_undo<kernels::ZeroOneEncode>(
        {.g = gradients(),
         .m = state(m_, Access::kRead),
         .b = state(local_sum_, Access::kRead),
         .to = encoder(to),
         .scalars = frame_.scalars_operand<ZeroOneGroupScalars>(),
         .clip = coefficient()},
        std::move(pieces), args, !frame_.state_copied());
  }

  kernels::EncoderOperands<OperandRef> encoder(const EncodeTarget& to) const {
    return {.c = state(s_.codec.worker, Access::kReadWrite),
            .old_scales = scales(s_.codec.worker_scale, Access::kRead),
            .bits = flat(to.bits, Access::kWrite, 1),
            .sums = blocks(to.blocks, Access::kWrite),
            .valid = frame_.valid_operand(Access::kRead, to.shard_begin),
            .flags = whole(to.flags, Access::kReadWrite, to.flags_offset, 4)};
  }

  // The averaged gradient is in the bits, or, on one rank, the gradient itself.
  void update_compressed(uint32_t word) {
    b_.kernel<kernels::FrozenAdam>(
        {.g = alone() ? gradients() : absent(),
         .bits = bits(),
         .messages = messages(),
         .m = state(m_, Access::kReadWrite),
         .v = state(v_, Access::kRead),
         .p = list(s_.params, Access::kReadWrite, 32),
         .scalars = frame_.scalars_operand<ZeroOneGroupScalars>(),
         .clip = alone() ? coefficient() : absent(),
         .valid = alone() ? frame_.valid_operand() : frame_.mask_operand()},
        frame_.updated(pieces_), SourceArgs{gradient_.type}, StepFrame::committing(word));
  }

  void update_sync(uint32_t word) {
    if (compat()) return sync_in_place(word);
    b_.kernel<kernels::ZeroOneSync>(
        {.x = {.floats = sum_ == kNoSlot ? absent() : state(sum_, Access::kRead),
               .bits = bits(),
               .messages = messages()},
         .m = state(m_, Access::kReadWrite),
         .b = state(local_sum_, Access::kWrite),
         .den = state(den_, Access::kRead),
         .anchor = state(anchor_, Access::kReadWrite),
         .p = list(s_.params, Access::kWrite, 32),
         .scalars = frame_.scalars_operand<ZeroOneGroupScalars>(),
         .valid = frame_.valid_operand()},
        frame_.updated(pieces_), NoArgs{}, StepFrame::committing(word));
  }

  StepPlan compressed_alone() {
    gradient_ = frame_.average_gradients();
    gradient_.word = frame_.settle(gradient_.word);
    update_compressed(gradient_.word);
    return frame_.finish(gradient_.word, {}, false);
  }

  StepPlan sync_alone() {
    gradient_ = frame_.local_gradients(Decide::kIfNeeded);
    const uint32_t flags = b_.scratch(4);
    b_.fill({flags, 0, 4}, 0);
    if (compat()) {
      sum_in_place(flags);
    } else {
      sum_ = flat_sums(flags);
      if (r_.shape.size > 1) sum_ = mean_of_host(sum_);
    }
    const uint32_t word = frame_.settle(frame_.decide_by_flags(flags, gradient_.word));
    update_sync(word);
    return frame_.finish(word, {}, false);
  }

  // What this rank has summed up, in full precision; 0 where masked or, with a flag, not finite.
  uint32_t flat_sums(uint32_t flags) {
    frame_.need_all();
    const uint32_t sums = b_.scratch(std::max<uint64_t>(1, layout_.flat_elements() * 4));
    // Padding travels with the mean of a host, and is not written below.
    if (alone() && r_.shape.size > 1) b_.fill({sums, 0, layout_.flat_elements() * 4}, 0);
    b_.kernel<kernels::ZeroOneEncode>({.g = gradients(),
                                       .m = state(m_, Access::kRead),
                                       .b = state(local_sum_, Access::kRead),
                                       .to = {.c = state(sums, Access::kWrite),
                                              .valid = frame_.valid_operand(),
                                              .flags = whole(flags, Access::kReadWrite, 0, 4)},
                                       .scalars = frame_.scalars_operand<ZeroOneGroupScalars>(),
                                       .clip = coefficient()},
                                      pieces_, EncodeArgs{0, r_.scale, true, gradient_.type});
    return sums;
  }

  // The same as a list, for the mean of a host. A rank without a shard has no message to put a flag
  // into, so it sends what raises that of the encoder.
  uint32_t sums_of_rank() {
    const uint32_t flags = b_.scratch(4);
    b_.fill({flags, 0, 4}, 0);
    const uint32_t sums = flat_sums(flags);
    KernelOptions if_flagged;
    if_flagged.predicate = {flags, 0, kFlagNonfinite};
    b_.fill({sums, 0, layout_.flat_elements() * 4}, 0xff, if_flagged);  // NaN
    const uint32_t tensors = frame_.scratch_list(Dtype::kF32);
    std::vector<Piece> pieces = pieces_;
    for (Piece& piece : pieces) piece.target = piece.offset;
    b_.kernel<kernels::Unpack>(
        {.flat = state(sums, Access::kRead), .tensors = target(tensors, Access::kWrite, 32)},
        std::move(pieces), PackArgs{0, 4});
    return tensors;
  }

  // In two levels with one host: of flat values of all ranks.
  uint32_t mean_of_host(uint32_t values) {
    const uint64_t counts[] = {layout_.flat_elements()};
    const uint32_t tensors[] = {0};
    const FlatLayout flat = FlatLayout::concatenated(counts, tensors);
    const uint32_t mean = b_.scratch(std::max<uint64_t>(1, counts[0] * 4));
    FlatReduceRequest reduce;
    reduce.rank = r_.shape.rank;
    reduce.size = r_.shape.size;
    reduce.layout = &flat;
    reduce.op = ReduceOp::kMean;
    reduce.in_list = values;
    reduce.out_flat = mean;
    reduce.round = b_.next_round();
    reduce.segment_bytes = r_.shape.sizes.segment_bytes;
    reduce.held = r_.shape.sizes.held;
    reduce.levels = r_.shape.average.levels;
    emit_flat_all_reduce(b_, reduce);
    return mean;
  }

  // What the kernels that update in place share.
  kernels::InPlaceOperands<OperandRef> in_place(Access access) {
    return {.g = gradients(),
            .m = state(m_, access),
            .b = state(local_sum_, access),
            .den = state(den_, Access::kRead),
            .p = list(s_.params, access, 32),
            .scalars = frame_.scalars_operand<ZeroOneGroupScalars>(),
            .clip = coefficient()};
  }

  void sum_in_place(uint32_t flags) {
    sum_ = frame_.scratch_list(Dtype::kF32);
    b_.kernel<kernels::ZeroOneInPlaceSum>(
        {.state = in_place(Access::kRead),
         .x = list(sum_, Access::kWrite, 32),
         .flags = flags == kNoSlot ? absent() : whole(flags, Access::kReadWrite, 0, 4)},
        pieces_, SourceArgs{gradient_.type});
  }

  void sync_in_place(uint32_t word) {
    b_.kernel<kernels::ZeroOneInPlaceSync>({.state = in_place(Access::kReadWrite),
                                            .x = alone() ? list(sum_, Access::kRead, 32) : absent(),
                                            .bits = bits(),
                                            .messages = messages(),
                                            .valid = alone() ? absent() : frame_.mask_operand()},
                                           frame_.updated(pieces_), SourceArgs{gradient_.type},
                                           StepFrame::committing(word));
  }

  // Of a step that nothing is exchanged for.
  void local_gradients() {
    gradient_ = frame_.local_gradients(Decide::kAlways);
    gradient_.word = frame_.settle(gradient_.word);
  }

  StepPlan local() {
    local_gradients();
    if (compat()) {
      b_.kernel<kernels::ZeroOneInPlaceLocal>(in_place(Access::kReadWrite), frame_.updated(pieces_),
                                              SourceArgs{gradient_.type},
                                              StepFrame::committing(gradient_.word));
      return frame_.finish(gradient_.word, {}, false);
    }
    b_.kernel<kernels::ZeroOneLocal>({.g = gradients(),
                                      .m = state(m_, Access::kReadWrite),
                                      .b = state(local_sum_, Access::kReadWrite),
                                      .den = state(den_, Access::kRead),
                                      .anchor = state(anchor_, Access::kRead),
                                      .p = list(s_.params, Access::kWrite, 32),
                                      .scalars = frame_.scalars_operand<ZeroOneGroupScalars>(),
                                      .clip = coefficient(),
                                      .valid = frame_.valid_operand()},
                                     frame_.updated(pieces_), SourceArgs{gradient_.type},
                                     StepFrame::committing(gradient_.word));
    return frame_.finish(gradient_.word, {}, false);
  }

  ZeroOneRequest r_;
  StepFrame frame_;
  PlanBuilder& b_;
  const CompressedLayout& layout_;
  StepSlots& s_;
  uint32_t m_, v_;
  uint32_t local_sum_ = kNoSlot, den_ = kNoSlot, anchor_ = kNoSlot, base_valid_ = kNoSlot;
  std::vector<Piece> pieces_;
  uint64_t messages_;
  GradientStage gradient_;
  uint32_t sum_ = kNoSlot;  // what is averaged, or on one rank would be: flat; compat: a list
};

}  // namespace

StepPlan build_zeroone_step(const ZeroOneRequest& request) { return ZeroOneStep(request).build(); }

}  // namespace sotto
