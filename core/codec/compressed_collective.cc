// The mean over ranks with every codec, and the plain collective.
#include "core/codec/compressed.h"
#include "core/plan/layout.h"

namespace sotto {
namespace {

struct Mean {
  PlanBuilder& b;
  const CompressedMeanRequest& r;
  const CompressedLayout& layout = *r.layout;
  const CodecSettings& codec = r.codec;
  PayloadUnit unit = codec.unit();
  CompressedSlots slots{};

  bool onebit() const { return codec.kind == CodecKind::kOnebit; }

  OperandRef valid() const {
    if (r.valid == kNoSlot) return absent();
    return whole(r.valid, Access::kRead, 0, layout.flat_elements() / 8);
  }

  CompressedSlots quant_slots() {
    CompressedSlots s;
    if (codec.residual) {
      s.worker = b.bound(layout.flat_elements() * 4);
      s.server = b.bound(layout.chunk_elements() * 4);
      s.server_next = b.bound(layout.chunk_elements() * 4);
    }
    s.bits = b.scratch(unit.bytes_of(layout.flat_elements()));
    s.messages = b.scratch(layout.message_bytes());
    return s;
  }

  void encode_onebit(std::vector<Piece> pieces, const EncodeTarget& to) {
    const EncodeArgs args{to.bits_base, codec.scale, false};
    b.kernel_with_undo<kernels::OnebitEncode>(
        {.x = list(r.in, Access::kRead, 32),
         .to = {.c = flat(slots.worker, Access::kReadWrite, 32),
                .old_scales = scales(slots.worker_scale, Access::kRead),
                .bits = flat(to.bits, Access::kWrite, 1, to.bits_base),
                .sums = blocks(to.blocks, Access::kWrite),
                .valid = valid(),
                .flags = whole(to.flags, Access::kReadWrite, to.flags_offset, 4)}},
        std::move(pieces), args);
  }

  void encode_quant(std::vector<Piece> pieces, const EncodeTarget& to) {
    const QuantArgs args{to.bits_base, 0, codec.block, 0, codec.kind};
    OperandRef payload = flat(to.bits, Access::kWrite, unit.bytes * 8, to.bits_base);
    payload.unit_elements = unit.elements;
    kernels::QuantEncodeOperands<OperandRef> operands{
        .x = list(r.in, Access::kRead, 32),
        .payload = payload,
        .flags = whole(to.flags, Access::kReadWrite, to.flags_offset, 4)};
    if (!codec.residual) {
      b.kernel<kernels::QuantEncode>(operands, std::move(pieces), args);
      return;
    }
    operands.e = flat(slots.worker, Access::kReadWrite, 32);
    b.kernel_with_undo<kernels::QuantEncode>(operands, std::move(pieces), args);
  }

  void decode(std::vector<Piece> pieces, const KernelOptions& options) {
    const OperandRef y = target(r.out, Access::kWrite, 32);
    if (onebit()) {
      b.kernel<kernels::OnebitDecode>({.bits = flat(slots.bits, Access::kRead, 1),
                                       .messages = message_scales(slots.messages, Access::kRead),
                                       .y = y,
                                       .valid = valid()},
                                      std::move(pieces), NoArgs{}, options);
      return;
    }
    OperandRef payload = flat(slots.bits, Access::kRead, unit.bytes * 8);
    payload.unit_elements = unit.elements;
    b.kernel<kernels::QuantDecode>({.payload = payload, .y = y}, std::move(pieces),
                                   QuantArgs{0, 0, codec.block, 0, codec.kind}, options);
  }

  void decode_all(uint32_t gate) {
    KernelOptions options;
    if (r.commits) {
      options.predicate = {gate, 0, kCommit};
      options.phase = Phase::kCommitting;
    }
    const uint64_t segment =
        segment_elements(r.segment_bytes, std::max(1u, unit.bytes * 8 / unit.elements));
    for (uint32_t s = 0; s < layout.sections().size(); ++s) {
      for (uint32_t k = 0; k < layout.ranks(); ++k) {
        for (const LayoutSegment& run : layout.segments(s, k, segment)) {
          std::vector<Piece> pieces = layout.worker_pieces(k, run);
          // Neither padding nor padding that is data.
          std::erase_if(pieces,
                        [&](const Piece& p) { return p.tensor >= layout.tensors().size(); });
          decode(std::move(pieces), options);
        }
      }
    }
  }
};

}  // namespace

CompressedMean emit_compressed_mean(PlanBuilder& b, const CompressedMeanRequest& request) {
  Mean mean{b, request};
  mean.slots = mean.onebit() ? add_onebit_slots(b, mean.layout) : mean.quant_slots();
  mean.slots.valid = request.valid;
  if (mean.slots.server != kNoSlot) b.committed(mean.slots.server);
  CompressedRequest r;
  r.rank = request.rank;
  r.layout = request.layout;
  r.scale = request.codec.scale;
  r.slots = mean.slots;
  r.segment_bytes = request.segment_bytes;
  r.kind = request.codec.kind;
  r.block = request.codec.block;
  r.encode = [&](std::vector<Piece> pieces, const EncodeTarget& to) {
    if (mean.onebit()) {
      mean.encode_onebit(std::move(pieces), to);
    } else {
      mean.encode_quant(std::move(pieces), to);
    }
  };
  CompressedMean out;
  out.slots = mean.slots;
  out.exchange = emit_compressed_all_reduce(b, r);
  if (mean.onebit()) emit_onebit_scale_undo(b, r);
  mean.decode_all(out.exchange.gate);
  return out;
}

CompressedCollective emit_compressed_collective(PlanBuilder& b, int32_t rank,
                                                const CompressedLayout& layout,
                                                const CodecSettings& codec,
                                                std::span<const uint8_t> in_place,
                                                uint64_t segment_bytes) {
  CompressedCollective c;
  std::vector<uint64_t> bytes;
  for (const LayoutTensor& t : layout.tensors()) bytes.push_back(t.count * 4);
  c.in = add_padded_list(b, layout, Dtype::kF32);
  c.out = b.bound_list(bytes);
  b.committed(c.out, bytes.size());
  for (uint32_t i = 0; i < bytes.size(); ++i) {
    if (in_place[i]) b.alias(c.in + i, c.out + i, 0);
  }
  CompressedMeanRequest r{rank, &layout, codec, c.in, c.out};
  r.commits = true;
  r.segment_bytes = segment_bytes;
  const CompressedMean mean = emit_compressed_mean(b, r);
  c.slots = mean.slots;
  const uint64_t messages = layout.message_bytes();
  c.verdict = b.host(8 + 2 * messages);
  b.set_verdict(c.verdict, mean.exchange.gate);
  b.copy({c.verdict, 8, messages}, {mean.exchange.worker_messages, 0, messages});
  b.copy({c.verdict, 8 + messages, messages}, {c.slots.messages, 0, messages});
  return c;
}

}  // namespace sotto
