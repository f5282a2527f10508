// 1 bit per element and a scale per compression instance (kernels/onebit.h; specification 1.1).
#include "core/codec/coding.h"

namespace sotto {
namespace {

// begin: the flat element that is the first one for the kernel.
OperandRef valid_operand(uint32_t slot, const CompressedLayout& layout, uint64_t begin = 0) {
  if (slot == kNoSlot) return absent();
  return whole(slot, Access::kRead, begin / 8, (layout.flat_elements() - begin) / 8);
}

class OnebitCoding final : public ServerCoding {
 public:
  void encode(PlanBuilder& b, const CompressedMeanRequest& r, const CompressedSlots& slots,
              std::vector<Piece> pieces, const EncodeTarget& to) const override {
    const EncodeArgs args{0, r.codec.scale, false};
    b.kernel_with_undo<kernels::OnebitEncode>(
        {.x = list(to.in == kNoSlot ? r.in : to.in, Access::kRead, 32),
         .to = {.c = flat(slots.worker, Access::kReadWrite, 32),
                .old_scales = scales(slots.worker_scale, Access::kRead),
                .bits = flat(to.bits, Access::kWrite, 1),
                .sums = blocks(to.blocks, Access::kWrite),
                .valid = valid_operand(slots.valid, *r.layout, to.shard_begin),
                .flags = whole(to.flags, Access::kReadWrite, to.flags_offset, 4)}},
        std::move(pieces), args, !r.state_copied);
  }

  void serve(PlanBuilder& b, const CompressedRequest& r, ServerRun run,
             const KernelOptions& options) const override {
    const CompressedSlots& slots = r.slots;
    const ServerArgs args{run.rows.row_bytes, run.shift, run.scales, run.rows.rows, r.scale};
    run.rows.unit_bits = run.rows.unit_elements = 1;
    b.kernel<kernels::OnebitServer>({.rows = run.rows,
                                     .messages = run.messages,
                                     .c = flat(slots.server, Access::kRead, 32),
                                     .old_scales = scales(slots.server_scale, Access::kRead),
                                     .bits = flat(slots.bits, Access::kWrite, 1, 0, run.shift / 8),
                                     .sums = run.sums,
                                     .valid = valid_operand(slots.valid, *r.layout),
                                     .new_c = flat(slots.server_next, Access::kWrite, 32)},
                                    std::move(run.pieces), args, options);
  }

  void decode(PlanBuilder& b, const CompressedMeanRequest& r, const CompressedSlots& slots,
              std::vector<Piece> pieces, const KernelOptions& options) const override {
    b.kernel<kernels::OnebitDecode>({.bits = flat(slots.bits, Access::kRead, 1),
                                     .messages = message_scales(slots.messages, Access::kRead),
                                     .y = target(r.out, Access::kWrite, 32),
                                     .valid = valid_operand(slots.valid, *r.layout)},
                                    std::move(pieces), NoArgs{}, options);
  }

  // The residuals that the encoders' undo leaves are not deferred: S = 0.
  void undo(PlanBuilder& b, const CompressedRequest& r) const override {
    UndoStep undo;
    undo.step = b.detached_fill({r.slots.worker_scale, 0, r.layout->instances() * 4}, 0);
    b.undo(std::move(undo));
  }

  std::string state_name(const CodecSettings& codec) const override {
    return std::string(scale_name(codec.scale));
  }
  std::string_view refused() const override { return "NaN or Inf"; }
};

}  // namespace

const Coding& onebit_coding() {
  static const OnebitCoding coding;
  return coding;
}

}  // namespace sotto
