#include "core/plan/onebit.h"

#include "core/plan/collectives.h"
#include "core/plan/layout.h"

namespace sotto {
namespace {

uint64_t at_least_one(uint64_t bytes) { return bytes == 0 ? 1 : bytes; }

// What the parts of one compressed all-reduce share.
struct Exchange {
  PlanBuilder& b;
  const OnebitRequest& r;
  const OnebitLayout& layout;
  uint32_t ranks;
  uint32_t me;
  uint64_t instances;
  uint64_t chunk_bytes;  // packed bits of one chunk
  uint64_t message_bytes;
  uint64_t segment;  // elements
  uint32_t round;

  int32_t peer(uint32_t i) const { return static_cast<int32_t>((me + i) % ranks); }
  // Bytes of a segment's bits within the packed flat space.
  Region bits_of(uint32_t slot, const OnebitSegment& s, uint64_t base) const {
    return {slot, (s.begin - base) / 8, s.count / 8};
  }
};

// Encodes all chunks, the next rank's first and the own one last, and sends each run as soon as it
// is encoded. `rows` takes the own bits and those of the other ranks for the own chunk.
void encode_and_send(Exchange& x, uint32_t rows, uint32_t blocks_slot, uint32_t flags) {
  const uint32_t outgoing = x.b.scratch(at_least_one(x.chunk_bytes * x.ranks));
  for (uint32_t i = 1; i <= x.ranks; ++i) {
    const auto k = static_cast<uint32_t>(x.peer(i));
    for (const OnebitSegment& s : x.layout.segments(k, x.segment)) {
      std::vector<Piece> pieces = x.layout.worker_pieces(k, s);
      if (k == x.me) {  // row `me` of rows lies where the chunk lies in the flat space
        x.r.encode(std::move(pieces), {rows, 0, blocks_slot, flags});
        continue;
      }
      x.r.encode(std::move(pieces), {outgoing, 0, blocks_slot, flags});
      x.b.send(static_cast<int32_t>(k), x.bits_of(outgoing, s, 0), x.round);
    }
  }
  for (uint32_t i = 1; i < x.ranks; ++i) {
    const int32_t from = x.peer(i);
    for (const OnebitSegment& s : x.layout.segments(x.me, x.segment)) {
      Region region = x.bits_of(rows, s, x.me * x.layout.chunk_elements());
      region.offset += static_cast<uint64_t>(from) * x.chunk_bytes;
      x.b.recv(from, region, x.round);
    }
  }
}

// Scales from block sums into state and into this rank's message, then the messages of all ranks.
void finish_scales(Exchange& x, uint32_t blocks_slot, uint64_t n_blocks, uint32_t counts,
                   std::vector<NormRange> ranges, uint32_t scale, uint32_t messages, uint32_t flags,
                   Predicate predicate, uint32_t round) {
  const NormArgs args{x.b.keep_array(std::span<const NormRange>(ranges)), x.instances, x.r.scale};
  KernelOptions options;
  options.predicate = predicate;
  x.b.kernel(KernelId::kNormFinish,
             {whole(blocks_slot, Access::kRead, 0, n_blocks * 4),
              whole(counts, Access::kRead, 0, x.instances * 8),
              whole(scale, Access::kWrite, 0, x.instances * 4),
              whole(messages, Access::kWrite, x.me * x.message_bytes, x.message_bytes),
              whole(flags, Access::kReadWrite, 0, 4)},
             {}, args, options);
  emit_message_exchange(x.b, x.r.rank, static_cast<int32_t>(x.ranks), messages, x.message_bytes,
                        round);
}

uint32_t emit_gate(Exchange& x, uint32_t messages, Predicate prior, uint32_t fail_word,
                   std::vector<uint32_t> after) {
  const uint32_t word = x.b.scratch(4);
  const OperandRef before =
      prior.slot == kNoSlot ? absent() : whole(prior.slot, Access::kRead, prior.offset, 4);
  KernelOptions options;
  options.after = std::move(after);
  x.b.kernel(KernelId::kGate,
             {whole(messages, Access::kRead, 0, x.message_bytes * x.ranks), before,
              whole(word, Access::kWrite, 0, 4)},
             {}, GateArgs{x.message_bytes, x.ranks, fail_word}, options);
  return word;
}

// Sums the rows, re-encodes, sends the own chunk's result to everybody and receives theirs.
void serve(Exchange& x, uint32_t rows, uint32_t worker_messages, uint32_t blocks_slot,
           Predicate go) {
  const OnebitSlots& s = x.r.slots;
  const uint64_t base = x.me * x.layout.chunk_elements();
  const ServerArgs args{x.chunk_bytes, base, x.instances, x.ranks, x.r.scale};
  const uint32_t first = x.b.steps();
  uint32_t last = kNoStep;
  for (const OnebitSegment& segment : x.layout.segments(x.me, x.segment)) {
    OperandRef row_ref = flat(rows, Access::kRead, 1);
    row_ref.footprint = Footprint::kRows;
    row_ref.rows = x.ranks;
    row_ref.row_bytes = x.chunk_bytes;
    OperandRef valid = absent();
    if (s.valid != kNoSlot) valid = whole(s.valid, Access::kRead, 0, x.layout.flat_elements() / 8);
    KernelOptions options;
    options.predicate = go;
    last = x.b.kernel(KernelId::kOnebitServer,
                      {row_ref, whole(worker_messages, Access::kRead, 0, x.message_bytes * x.ranks),
                       flat(s.server, Access::kReadWrite, 32),
                       whole(s.server_scale, Access::kRead, 0, x.instances * 4),
                       flat(s.bits, Access::kWrite, 1, 0, x.me * x.chunk_bytes),
                       blocks(blocks_slot, Access::kWrite), valid},
                      x.layout.server_pieces(x.me, segment), args, options);
    for (uint32_t i = 1; i < x.ranks; ++i)
      x.b.send(x.peer(i), x.bits_of(s.bits, segment, 0), x.round + 1);
  }
  if (last != kNoStep) {
    for (const uint32_t slot : {s.server, s.server_scale}) {
      UndoStep undo;
      const uint64_t bytes = slot == s.server ? x.layout.chunk_elements() * 4 : x.instances * 4;
      undo.step =
          x.b.detached(KernelId::kFill, {whole(slot, Access::kWrite, 0, bytes)}, {}, FillArgs{0});
      undo.step.fill_bytes = bytes;
      undo.step.predicate = go;
      undo.pair_first = first;
      undo.pair_last = last;
      undo.only_if_paired_ran = true;
      x.b.undo(std::move(undo));
    }
  }
  for (uint32_t i = 1; i < x.ranks; ++i) {
    const auto from = static_cast<uint32_t>(x.peer(i));
    for (const OnebitSegment& segment : x.layout.segments(from, x.segment)) {
      x.b.recv(static_cast<int32_t>(from), x.bits_of(s.bits, segment, 0), x.round + 1);
    }
  }
}

}  // namespace

OnebitSlots add_onebit_slots(PlanBuilder& b, const OnebitLayout& layout, bool masked) {
  OnebitSlots s;
  s.worker = b.bound(layout.flat_elements() * 4);
  s.worker_scale = b.bound(layout.instances() * 4);
  s.server = b.bound(layout.chunk_elements() * 4);
  s.server_scale = b.bound(layout.instances() * 4);
  s.worker_counts = b.bound(layout.instances() * 8);
  s.server_counts = b.bound(layout.instances() * 8);
  s.bits = b.bound(layout.flat_elements() / 8);
  s.messages = b.bound(scale_message_bytes(layout.instances()) * layout.ranks());
  if (masked) s.valid = b.bound(layout.flat_elements() / 8);
  return s;
}

OnebitResult emit_onebit_all_reduce(PlanBuilder& b, const OnebitRequest& r) {
  const OnebitLayout& layout = *r.layout;
  Exchange x{b,
             r,
             layout,
             layout.ranks(),
             static_cast<uint32_t>(r.rank),
             layout.instances(),
             layout.chunk_elements() / 8,
             scale_message_bytes(layout.instances()),
             segment_elements(r.segment_bytes, 1),
             b.next_round()};
  OnebitResult result;
  result.worker_messages = b.scratch(x.message_bytes * x.ranks);
  const uint32_t rows = b.scratch(at_least_one(x.chunk_bytes * x.ranks));
  const uint32_t worker_blocks = b.scratch(at_least_one(layout.worker_blocks() * 4));
  const uint32_t server_blocks = b.scratch(at_least_one(layout.server_blocks() * 4));
  const uint32_t worker_flags = b.scratch(4);
  const uint32_t server_flags = b.scratch(4);
  b.fill({worker_flags, 0, 4}, 0);
  b.fill({server_flags, 0, 4}, 0);

  encode_and_send(x, rows, worker_blocks, worker_flags);
  finish_scales(x, worker_blocks, layout.worker_blocks(), r.slots.worker_counts,
                layout.worker_ranges(), r.slots.worker_scale, result.worker_messages, worker_flags,
                {}, x.round);
  result.gate_workers = emit_gate(x, result.worker_messages, r.prior, kSkipNonfinite, {});
  const Predicate go{result.gate_workers, 0, kCommit};
  serve(x, rows, result.worker_messages, server_blocks, go);
  finish_scales(x, server_blocks, layout.server_blocks(), r.slots.server_counts,
                layout.server_ranges(x.me), r.slots.server_scale, r.slots.messages, server_flags,
                go, x.round + 1);
  result.gate = emit_gate(x, r.slots.messages, go, kSkipServer, b.receives());
  return result;
}

void emit_onebit_scale_undo(PlanBuilder& b, const OnebitRequest& r) {
  UndoStep undo;
  const uint64_t bytes = r.layout->instances() * 4;
  undo.step = b.detached(KernelId::kFill, {whole(r.slots.worker_scale, Access::kWrite, 0, bytes)},
                         {}, FillArgs{0});
  undo.step.fill_bytes = bytes;
  b.undo(std::move(undo));
}

OnebitCollective emit_onebit_collective(PlanBuilder& b, int32_t rank, const OnebitLayout& layout,
                                        ScaleKind scale, const std::vector<uint8_t>& in_place,
                                        uint64_t segment_bytes) {
  OnebitCollective c;
  std::vector<uint64_t> bytes;
  for (const OnebitTensor& t : layout.tensors()) bytes.push_back(t.count * 4);
  c.in = b.bound_list(bytes);
  c.out = b.bound_list(bytes);
  for (uint32_t i = 0; i < bytes.size(); ++i) {
    if (in_place[i]) b.alias(c.in + i, c.out + i, 0);
  }
  c.slots = add_onebit_slots(b, layout, false);
  OnebitRequest r;
  r.rank = rank;
  r.layout = &layout;
  r.scale = scale;
  r.slots = c.slots;
  r.segment_bytes = segment_bytes;
  r.encode = [&](std::vector<Piece> pieces, const OnebitEncodeTarget& to) {
    const EncodeArgs args{to.bits_base, layout.instances(), scale, false};
    const std::vector<OperandRef> operands{
        list(c.in, Access::kRead, 32),
        flat(c.slots.worker, Access::kReadWrite, 32),
        whole(c.slots.worker_scale, Access::kRead, 0, layout.instances() * 4),
        flat(to.bits, Access::kWrite, 1, to.bits_base),
        blocks(to.blocks, Access::kWrite),
        absent(),
        whole(to.flags, Access::kReadWrite, 0, 4)};
    UndoStep undo;
    undo.step = b.detached(KernelId::kOnebitEncodeUndo, operands, pieces, args);
    undo.pair_first = undo.pair_last =
        b.kernel(KernelId::kOnebitEncode, operands, std::move(pieces), args);
    b.undo(std::move(undo));
  };
  const OnebitResult result = emit_onebit_all_reduce(b, r);
  emit_onebit_scale_undo(b, r);
  const uint64_t messages = scale_message_bytes(layout.instances()) * layout.ranks();
  KernelOptions decode;
  decode.predicate = {result.gate, 0, kCommit};
  decode.phase = Phase::kCommitting;
  const uint64_t segment = segment_elements(segment_bytes, 1);
  for (uint32_t k = 0; k < layout.ranks(); ++k) {
    for (const OnebitSegment& s : layout.segments(k, segment)) {
      std::vector<Piece> pieces = layout.worker_pieces(k, s);
      std::erase_if(pieces, [](const Piece& p) { return p.tensor == kNoTensor; });
      b.kernel(KernelId::kOnebitDecode,
               {flat(c.slots.bits, Access::kRead, 1),
                whole(c.slots.messages, Access::kRead, 0, messages),
                target(c.out, Access::kWrite, 32), absent()},
               std::move(pieces), DecodeArgs{layout.instances()}, decode);
    }
  }
  c.verdict = b.host(8 + 2 * messages);
  b.copy({c.verdict, 0, 4}, {result.gate, 0, 4});
  b.copy({c.verdict, 8, messages}, {result.worker_messages, 0, messages});
  b.copy({c.verdict, 8 + messages, messages}, {c.slots.messages, 0, messages});
  b.set_verdict(c.verdict);
  return c;
}

}  // namespace sotto
