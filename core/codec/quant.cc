// Casts to 16-bit floats and integers by blocks (kernels/quant.h). Their payload says all, so
// masks are not looked at, and a server waits for its rows only.
#include "core/codec/coding.h"

namespace sotto {
namespace {

class QuantCoding final : public ServerCoding {
 public:
  void encode(PlanBuilder& b, const CompressedMeanRequest& r, const CompressedSlots& slots,
              std::vector<Piece> pieces, const EncodeTarget& to) const override {
    const CodecSettings& codec = r.codec;
    const QuantArgs args{0, 0, codec.block, 0, codec.kind};
    kernels::QuantEncodeOperands<OperandRef> operands{
        .x = list(to.in == kNoSlot ? r.in : to.in, Access::kRead, 32),
        .payload = payload_operand(to.bits, Access::kWrite, codec.unit()),
        .flags = whole(to.flags, Access::kReadWrite, to.flags_offset, 4)};
    if (!codec.residual) {
      b.kernel<kernels::QuantEncode>(operands, std::move(pieces), args);
      return;
    }
    operands.e = flat(slots.worker, Access::kReadWrite, 32);
    b.kernel_with_undo<kernels::QuantEncode>(operands, std::move(pieces), args, !r.state_copied);
  }

  void serve(PlanBuilder& b, const CompressedRequest& r, ServerRun run,
             const KernelOptions& options) const override {
    const CompressedSlots& slots = r.slots;
    const PayloadUnit unit = payload_unit(r.kind, r.block);
    const QuantArgs args{0, run.rows.row_bytes, r.block, run.rows.rows, r.kind};
    const bool residual = slots.server != kNoSlot;
    b.kernel<kernels::QuantServer>(
        {.rows = run.rows,
         .e = residual ? flat(slots.server, Access::kRead, 32) : absent(),
         .new_e = residual ? flat(slots.server_next, Access::kWrite, 32) : absent(),
         .payload = payload_operand(slots.bits, Access::kWrite, unit, 0, unit.bytes_of(run.shift)),
         .flags = run.flags},
        std::move(run.pieces), args, options);
  }

  void decode(PlanBuilder& b, const CompressedMeanRequest& r, const CompressedSlots& slots,
              std::vector<Piece> pieces, const KernelOptions& options) const override {
    b.kernel<kernels::QuantDecode>(
        {.payload = payload_operand(slots.bits, Access::kRead, r.codec.unit()),
         .y = target(r.out, Access::kWrite, 32)},
        std::move(pieces), QuantArgs{0, 0, r.codec.block, 0, r.codec.kind}, options);
  }

  std::string state_name(const CodecSettings& codec) const override {
    const std::string_view name = codec_name(codec.kind);
    return codec.block == 0 ? std::string(name) : fmt::format("{}/{}", name, codec.block);
  }
  std::string_view refused() const override {
    return "NaN or Inf, or a value that the codec has no number for,";
  }
};

}  // namespace

const Coding& quant_coding() {
  static const QuantCoding coding;
  return coding;
}

}  // namespace sotto
