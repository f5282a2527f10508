#include "core/codec/compressed.h"

#include <algorithm>
#include <numeric>

#include "core/codec/coding.h"
#include "core/plan/collectives.h"
#include "core/plan/layout.h"

namespace sotto {
namespace {

// What follows on the arrival of messages has a lane of its own (if the device has a second), so
// that it does not queue behind the encoders of later sections.
constexpr uint16_t kServerLane = 1;

uint64_t at_least_one(uint64_t bytes) { return bytes == 0 ? 1 : bytes; }

// What the sections of one compressed all-reduce share.
struct Exchange {
  PlanBuilder& b;
  const CompressedRequest& r;
  const CompressedLayout& layout;
  const ServerCoding& coding;
  PayloadUnit unit;
  uint32_t ranks;
  uint32_t me;
  uint64_t segment;  // elements
  // Scratch of all sections. rows: of each section the own chunk's payloads of all ranks, in rank
  // order, where the section lies in the flat space.
  uint32_t outgoing, rows, worker_messages, worker_blocks, server_blocks;
  uint32_t worker_flags, server_flags;  // a word per section

  uint32_t peer(uint32_t i) const { return (me + i) % ranks; }
  Region payload_of(uint32_t slot, const LayoutSegment& s) const {
    return {slot, unit.bytes_of(s.begin), unit.bytes_of(s.count)};
  }
};

// One section on its way.
struct SectionRun {
  Exchange& x;
  uint32_t index;
  const LayoutSection& at;
  uint32_t round1, round2;

  uint64_t scales() const { return at.message_bytes / 4 - 1; }
  std::vector<LayoutSegment> segments(uint32_t chunk) const {
    return x.layout.segments(index, chunk, x.segment);
  }
  OperandRef flags(uint32_t slot) const { return whole(slot, Access::kReadWrite, 4 * index, 4); }
  OperandRef messages(uint32_t slot) const {
    return whole(slot, Access::kRead, at.message_offset, at.message_bytes * x.ranks);
  }
};

// Encodes all chunks, the next rank's first and the own one last, and sends each run as soon as it
// is encoded.
void encode_and_send(SectionRun& s) {
  Exchange& x = s.x;
  x.b.stage(Stage::kScatter);
  for (uint32_t i = 1; i <= x.ranks; ++i) {
    const uint32_t k = x.peer(i);
    for (const LayoutSegment& segment : s.segments(k)) {
      // Row `me` of rows lies where the own chunk lies in the flat space.
      const uint32_t to = k == x.me ? x.rows : x.outgoing;
      std::vector<Piece> pieces = x.layout.worker_pieces(k, segment);
      if (x.r.late != nullptr) x.r.late->need(pieces);
      x.r.encode(std::move(pieces),
                 {to, 0, x.worker_blocks, x.worker_flags, uint64_t{4} * s.index});
      if (k != x.me) x.b.send(static_cast<int32_t>(k), x.payload_of(x.outgoing, segment), s.round1);
    }
  }
  for (uint32_t i = 1; i < x.ranks; ++i) {
    const uint32_t from = x.peer(i);
    for (LayoutSegment segment : s.segments(x.me)) {
      segment.begin += x.layout.chunk_begin(s.at, from) - x.layout.chunk_begin(s.at, x.me);
      x.b.recv(static_cast<int32_t>(from), x.payload_of(x.rows, segment), s.round1);
    }
  }
  x.b.stage(Stage::kOther);
}

// Where a section's scales come from and go to.
struct ScaleSlots {
  uint32_t blocks, counts, scale, messages, flags;
};

// Scales from block sums into state and into this rank's message, with the flags; then the messages
// of all ranks. all: norm ranges of every instance.
void exchange_scales(SectionRun& s, const ScaleSlots& slots, const std::vector<NormRange>& all,
                     const KernelOptions& options, uint32_t round) {
  Exchange& x = s.x;
  const auto own_offset = [&](uint32_t rank) {
    return s.at.message_offset + rank * s.at.message_bytes;
  };
  std::vector<NormRange> ranges;
  if (s.scales() != 0) {
    const auto first = all.begin() + static_cast<ptrdiff_t>(s.at.first_instance);
    ranges.assign(first, first + static_cast<ptrdiff_t>(s.at.instances));
  }
  OperandRef sums = absent(), counts = absent(), scale = absent();
  if (!ranges.empty()) {
    const uint64_t first = ranges.front().first_block;
    const uint64_t end = ranges.back().first_block + ranges.back().blocks;
    for (NormRange& range : ranges) range.first_block -= first;
    sums = whole(slots.blocks, Access::kRead, first * 4, (end - first) * 4);
    counts = whole(slots.counts, Access::kRead, s.at.first_instance * 8, ranges.size() * 8);
    scale = whole(slots.scale, Access::kWrite, s.at.first_instance * 4, ranges.size() * 4);
  }
  x.b.kernel<kernels::NormFinish>(
      {.sums = sums,
       .counts = counts,
       .scales = scale,
       .message = whole(slots.messages, Access::kWrite, own_offset(x.me), s.at.message_bytes),
       .flags = s.flags(slots.flags)},
      {}, NormArgs{x.b.keep_array(std::span<const NormRange>(ranges)), ranges.size(), x.r.scale},
      options);
  for (uint32_t i = 1; i < x.ranks; ++i) {
    x.b.send(static_cast<int32_t>(x.peer(i)),
             {slots.messages, own_offset(x.me), s.at.message_bytes}, round,
             MessageClass::kMetadata);
  }
  for (uint32_t i = 1; i < x.ranks; ++i) {
    const uint32_t from = x.peer(i);
    x.b.recv(static_cast<int32_t>(from), {slots.messages, own_offset(from), s.at.message_bytes},
             round, MessageClass::kMetadata);
  }
}

// A decision over the messages of one section (args without sections) or of all.
uint32_t emit_gate(PlanBuilder& b, OperandRef messages, Predicate prior, const GateArgs& args) {
  const uint32_t word = b.scratch(4);
  const OperandRef before =
      prior.slot == kNoSlot ? absent() : whole(prior.slot, Access::kRead, prior.offset, 4);
  KernelOptions options;
  options.lane = kServerLane;
  b.kernel<kernels::Gate>(
      {.messages = messages, .prior = before, .word = whole(word, Access::kWrite, 0, 4)}, {}, args,
      options);
  return word;
}

uint32_t gate_all(Exchange& x, uint32_t messages, Predicate prior, uint32_t fail_word) {
  std::vector<uint64_t> sections;
  for (const LayoutSection& s : x.layout.sections()) sections.push_back(s.message_bytes);
  const GateArgs args{0, x.ranks, fail_word, x.b.keep_array(std::span<const uint64_t>(sections)),
                      sections.size()};
  return emit_gate(x.b, whole(messages, Access::kRead, 0, x.layout.message_bytes()), prior, args);
}

ServerRun server_run(const SectionRun& s, const LayoutSegment& segment) {
  const Exchange& x = s.x;
  OperandRef rows = payload_operand(x.rows, Access::kRead, x.unit, 0,
                                    x.unit.bytes_of(s.at.flat_begin - s.at.server_begin));
  rows.footprint = Footprint::kRows;
  rows.rows = x.ranks;
  rows.row_bytes = x.unit.bytes_of(s.at.chunk);
  return {.pieces = x.layout.server_pieces(x.me, segment),
          .rows = rows,
          .shift = x.layout.chunk_begin(s.at, x.me) - s.at.server_begin,
          .scales = s.scales(),
          .messages = s.messages(x.worker_messages),
          .sums = blocks(x.server_blocks, Access::kWrite),
          .flags = s.flags(x.server_flags)};
}

// Sums the rows, re-encodes, sends the own chunk's result to everybody and receives theirs.
void serve(SectionRun& s, const KernelOptions& options) {
  Exchange& x = s.x;
  const uint32_t bits = x.r.slots.bits;
  x.b.stage(Stage::kGather);
  for (const LayoutSegment& segment : s.segments(x.me)) {
    x.coding.serve(x.b, x.r, server_run(s, segment), options);
    for (uint32_t i = 1; i < x.ranks; ++i)
      x.b.send(static_cast<int32_t>(x.peer(i)), x.payload_of(bits, segment), s.round2);
  }
  for (uint32_t i = 1; i < x.ranks; ++i) {
    const uint32_t from = x.peer(i);
    for (const LayoutSegment& segment : s.segments(from))
      x.b.recv(static_cast<int32_t>(from), x.payload_of(bits, segment), s.round2);
  }
  x.b.stage(Stage::kOther);
}

// Every rank drops its server residual when the sums of one were not finite.
void emit_server_reset(Exchange& x, uint32_t gate) {
  const auto reset = [&](uint32_t slot, uint64_t bytes) {
    if (slot == kNoSlot) return;
    UndoStep undo;
    undo.step = x.b.detached_fill({slot, 0, bytes}, 0);
    undo.step.predicate = {gate, 0, kSkipServer};
    undo.pair_first = undo.pair_last = x.b.steps() - 1;
    undo.only_if_paired_ran = true;
    x.b.undo(std::move(undo));
  };
  reset(x.r.slots.server, x.layout.chunk_elements() * 4);
  reset(x.r.slots.server_scale, x.layout.instances() * 4);
}

// The sections in the order in which they are emitted, the same on all ranks.
std::vector<uint32_t> section_order(const CompressedRequest& r) {
  const CompressedLayout& layout = *r.layout;
  std::vector<uint32_t> order(layout.sections().size());
  std::iota(order.begin(), order.end(), 0u);
  if (r.late == nullptr) return order;
  std::vector<uint32_t> last;  // input, by section
  for (uint32_t s = 0; s < order.size(); ++s) {
    uint32_t input = 0;
    for (uint32_t k = 0; k < layout.ranks(); ++k) {
      for (const LayoutSegment& segment : layout.segments(s, k, segment_elements(0, 1)))
        input = std::max(input, r.late->last(layout.worker_pieces(k, segment)));
    }
    last.push_back(input);
  }
  std::ranges::stable_sort(order, {}, [&](uint32_t s) { return last[s]; });
  return order;
}

Exchange make_exchange(PlanBuilder& b, const CompressedRequest& r) {
  const CompressedLayout& layout = *r.layout;
  const PayloadUnit unit = payload_unit(r.kind, r.block);
  Exchange x{b,
             r,
             layout,
             *coding_of(r.kind).servers(),
             unit,
             layout.ranks(),
             static_cast<uint32_t>(r.rank),
             segment_elements(r.segment_bytes, std::max(1u, unit.bytes * 8 / unit.elements)),
             b.scratch(at_least_one(unit.bytes_of(layout.compressed_elements()))),
             b.scratch(at_least_one(unit.bytes_of(layout.compressed_elements()))),
             b.scratch(at_least_one(layout.message_bytes())),
             b.scratch(at_least_one(layout.worker_blocks() * 4)),
             b.scratch(at_least_one(layout.server_blocks() * 4)),
             r.worker_flags != kNoSlot ? r.worker_flags : add_worker_flags(b, layout),
             b.scratch(at_least_one(layout.sections().size() * 4))};
  return x;
}

}  // namespace

uint32_t add_worker_flags(PlanBuilder& b, const CompressedLayout& layout) {
  const uint64_t bytes = layout.sections().size() * 4;
  const uint32_t flags = b.scratch(at_least_one(bytes));
  b.fill({flags, 0, bytes}, 0);
  return flags;
}

uint32_t add_padded_list(PlanBuilder& b, const CompressedLayout& layout, Dtype type) {
  const uint64_t element = dtype_bytes(type);
  std::vector<uint64_t> bytes;
  for (const LayoutTensor& t : layout.tensors()) bytes.push_back(t.count * element);
  uint64_t longest = 0;
  for (const LayoutTensor& t : layout.padding()) {
    bytes.push_back(t.count * element);
    longest = std::max(longest, bytes.back());
  }
  const uint32_t first = b.bound_list(bytes);
  if (longest == 0) return first;
  const uint32_t zeros = b.scratch(longest);
  b.fill({zeros, 0, longest}, 0);
  for (auto t = static_cast<uint32_t>(layout.tensors().size()); t < bytes.size(); ++t)
    b.alias(first + t, zeros, 0);
  return first;
}

CompressedSlots add_codec_slots(PlanBuilder& b, const CompressedLayout& layout,
                                const CodecSettings& codec, KeptState* kept) {
  const bool has_scales = codec.row().scales;
  const auto errors = [&](uint64_t elements) {
    return codec.residual ? b.bound(elements * 4) : kNoSlot;
  };
  const auto per_instance = [&](uint64_t bytes) {
    return has_scales ? b.bound(layout.instances() * bytes) : kNoSlot;
  };
  // What encoders change.
  const auto of_workers = [&](uint64_t bytes) {
    return kept != nullptr ? kept->add(bytes) : b.bound(bytes);
  };
  const auto result = [&](uint64_t bytes) {
    return has_scales ? b.bound(bytes) : b.scratch(bytes);
  };
  CompressedSlots s;
  if (codec.residual) s.worker = of_workers(layout.compressed_elements() * 4);
  if (codec.row().sparse) return s;
  if (has_scales) s.worker_scale = of_workers(layout.instances() * 4);
  s.server = errors(layout.chunk_elements());
  s.server_scale = per_instance(4);
  s.server_next = errors(layout.chunk_elements());
  s.server_scale_next = per_instance(4);
  s.worker_counts = per_instance(8);
  s.server_counts = per_instance(8);
  s.bits = result(codec.unit().bytes_of(layout.compressed_elements()));
  s.messages = result(layout.message_bytes());
  return s;
}

CompressedResult emit_compressed_all_reduce(PlanBuilder& b, const CompressedRequest& r) {
  Exchange x = make_exchange(b, r);
  const auto n = static_cast<uint32_t>(x.layout.sections().size());
  const uint32_t first_round = b.next_round();
  b.reserve_rounds(first_round + 2 * n);
  b.fill({x.server_flags, 0, uint64_t{4} * n}, 0);
  const std::vector<NormRange> worker_ranges = x.layout.worker_ranges();
  const std::vector<NormRange> server_ranges = x.layout.server_ranges(x.me);
  const CompressedSlots& slots = r.slots;
  const bool gate_per_section = codec_row(r.kind).scales;
  CompressedResult result;
  result.worker_messages = x.worker_messages;
  const std::vector<uint32_t> order = section_order(r);
  for (uint32_t i = 0; i < n; ++i) {
    // On transports that match by order the first exchange of a section comes before the second of
    // the section before it.
    SectionRun s{x, order[i], x.layout.sections()[order[i]], first_round + (i == 0 ? 0 : 2 * i - 1),
                 first_round + std::min(2 * i + 2, 2 * n - 1)};
    encode_and_send(s);
    exchange_scales(s,
                    {x.worker_blocks, slots.worker_counts, slots.worker_scale, x.worker_messages,
                     x.worker_flags},
                    worker_ranges, {}, s.round1);
    KernelOptions server;
    server.lane = kServerLane;
    if (gate_per_section) {
      const GateArgs args{s.at.message_bytes, x.ranks, kSkipNonfinite};
      result.gate_workers = emit_gate(b, s.messages(x.worker_messages), r.prior, args);
      server.predicate = {result.gate_workers, 0, kCommit};
    }
    serve(s, server);
    exchange_scales(s,
                    {x.server_blocks, slots.server_counts, slots.server_scale_next, slots.messages,
                     x.server_flags},
                    server_ranges, server, s.round2);
  }
  if (n != 1 || !gate_per_section)
    result.gate_workers = gate_all(x, x.worker_messages, r.prior, kSkipNonfinite);
  result.gate = gate_all(x, slots.messages, {result.gate_workers, 0, kCommit}, kSkipServer);
  emit_server_reset(x, result.gate);
  if (r.kept == nullptr) x.coding.undo(b, r);
  return result;
}

}  // namespace sotto
