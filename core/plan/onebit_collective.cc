// The plain compressed all-reduce of every codec.
#include "core/plan/layout.h"
#include "core/plan/onebit.h"

namespace sotto {
namespace {

struct Builder {
  PlanBuilder& b;
  const OnebitLayout& layout;
  const OnebitCoding& coding;
  OnebitCollective& c;
  PayloadUnit unit = payload_unit(coding.kind, coding.block);

  bool onebit() const { return coding.kind == CodecKind::kOnebit; }

  OnebitSlots quant_slots() {
    OnebitSlots s;
    if (coding.residual) {
      s.worker = b.bound(layout.flat_elements() * 4);
      s.server = b.bound(layout.chunk_elements() * 4);
      s.server_next = b.bound(layout.chunk_elements() * 4);
    }
    s.bits = b.scratch(unit.bytes_of(layout.flat_elements()));
    s.messages = b.scratch(layout.message_bytes());
    return s;
  }

  void encode_onebit(std::vector<Piece> pieces, const OnebitEncodeTarget& to) {
    const EncodeArgs args{to.bits_base, coding.scale, false};
    const std::vector<OperandRef> operands{list(c.in, Access::kRead, 32),
                                           flat(c.slots.worker, Access::kReadWrite, 32),
                                           scales(c.slots.worker_scale, Access::kRead),
                                           flat(to.bits, Access::kWrite, 1, to.bits_base),
                                           blocks(to.blocks, Access::kWrite),
                                           absent(),
                                           whole(to.flags, Access::kReadWrite, to.flags_offset, 4),
                                           absent()};
    UndoStep undo;
    undo.step = b.detached(KernelId::kOnebitEncodeUndo, operands, pieces, args);
    undo.pair_first = undo.pair_last =
        b.kernel(KernelId::kOnebitEncode, operands, std::move(pieces), args);
    b.undo(std::move(undo));
  }

  void encode_quant(std::vector<Piece> pieces, const OnebitEncodeTarget& to) {
    const QuantArgs args{to.bits_base, 0, coding.block, 0, coding.kind};
    OperandRef payload = flat(to.bits, Access::kWrite, unit.bytes * 8, to.bits_base);
    payload.unit_elements = unit.elements;
    const OperandRef x = list(c.in, Access::kRead, 32);
    const OperandRef flags = whole(to.flags, Access::kReadWrite, to.flags_offset, 4);
    if (!coding.residual) {
      b.kernel(KernelId::kQuantEncode, {x, absent(), payload, flags}, std::move(pieces), args);
      return;
    }
    const OperandRef e = flat(c.slots.worker, Access::kReadWrite, 32);
    UndoStep undo;
    OperandRef written = payload;
    written.access = Access::kRead;
    undo.step = b.detached(KernelId::kQuantEncodeUndo, {x, e, written, absent()}, pieces, args);
    undo.pair_first = undo.pair_last =
        b.kernel(KernelId::kQuantEncode, {x, e, payload, flags}, std::move(pieces), args);
    b.undo(std::move(undo));
  }

  void decode(std::vector<Piece> pieces, const KernelOptions& options) {
    const OperandRef y = target(c.out, Access::kWrite, 32);
    if (onebit()) {
      b.kernel(KernelId::kOnebitDecode,
               {flat(c.slots.bits, Access::kRead, 1),
                message_scales(c.slots.messages, Access::kRead), y, absent()},
               std::move(pieces), NoArgs{}, options);
      return;
    }
    OperandRef payload = flat(c.slots.bits, Access::kRead, unit.bytes * 8);
    payload.unit_elements = unit.elements;
    b.kernel(KernelId::kQuantDecode, {payload, y}, std::move(pieces),
             QuantArgs{0, 0, coding.block, 0, coding.kind}, options);
  }

  void decode_all(uint32_t gate, uint64_t segment_bytes) {
    KernelOptions options;
    options.predicate = {gate, 0, kCommit};
    options.phase = Phase::kCommitting;
    const uint64_t segment =
        segment_elements(segment_bytes, std::max(1u, unit.bytes * 8 / unit.elements));
    for (uint32_t s = 0; s < layout.sections().size(); ++s) {
      for (uint32_t k = 0; k < layout.ranks(); ++k) {
        for (const OnebitSegment& run : layout.segments(s, k, segment)) {
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

OnebitCollective emit_onebit_collective(PlanBuilder& b, int32_t rank, const OnebitLayout& layout,
                                        const OnebitCoding& coding,
                                        const std::vector<uint8_t>& in_place,
                                        uint64_t segment_bytes) {
  OnebitCollective c;
  Builder builder{b, layout, coding, c};
  std::vector<uint64_t> bytes;
  for (const OnebitTensor& t : layout.tensors()) bytes.push_back(t.count * 4);
  c.in = add_padded_list(b, layout, Dtype::kF32);
  c.out = b.bound_list(bytes);
  for (uint32_t i = 0; i < bytes.size(); ++i) {
    if (in_place[i]) b.alias(c.in + i, c.out + i, 0);
  }
  c.slots = builder.onebit() ? add_onebit_slots(b, layout, false) : builder.quant_slots();
  OnebitRequest r;
  r.rank = rank;
  r.layout = &layout;
  r.scale = coding.scale;
  r.slots = c.slots;
  r.segment_bytes = segment_bytes;
  r.kind = coding.kind;
  r.block = coding.block;
  r.encode = [&](std::vector<Piece> pieces, const OnebitEncodeTarget& to) {
    if (builder.onebit()) {
      builder.encode_onebit(std::move(pieces), to);
    } else {
      builder.encode_quant(std::move(pieces), to);
    }
  };
  const OnebitResult result = emit_onebit_all_reduce(b, r);
  if (builder.onebit()) emit_onebit_scale_undo(b, r);
  builder.decode_all(result.gate, segment_bytes);
  const uint64_t messages = layout.message_bytes();
  c.verdict = b.host(8 + 2 * messages);
  b.copy({c.verdict, 0, 4}, {result.gate, 0, 4});
  b.copy({c.verdict, 8, messages}, {result.worker_messages, 0, messages});
  b.copy({c.verdict, 8 + messages, messages}, {c.slots.messages, 0, messages});
  b.set_verdict(c.verdict);
  return c;
}

}  // namespace sotto
