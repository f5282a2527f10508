#include "core/codec/compressed.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/codec/coding.h"
#include "core/codec/host_mean.h"
#include "core/plan/collectives.h"
#include "core/plan/layout.h"

namespace sotto {
namespace {

// What follows on the arrival of messages has a lane of its own (if the device has a second), so
// that it does not queue behind the encoders of later sections.
constexpr uint16_t kServerLane = 1;

uint64_t at_least_one(uint64_t bytes) { return bytes == 0 ? 1 : bytes; }

// What both encoders of a rank have, that of its input and that of the sums it serves.
template <class T>
struct Encoders {
  T worker, server;
};

// What the sections of one compressed all-reduce share. Its ranks are those that serve one shard:
// all ranks of the comm, or in two levels one of every host.
struct Exchange {
  PlanBuilder& b;
  const CompressedRequest& r;
  const CompressedLayout& layout;
  const ServerCoding& coding;
  PayloadUnit unit;
  uint32_t ranks;
  uint32_t me;
  uint32_t shard;
  uint64_t segment;  // elements
  // Scratch of all sections, for the shard. rows: of each section the own chunk's payloads of all
  // ranks, in rank order, where the section lies in the shard.
  uint32_t outgoing, rows;
  uint32_t worker_messages;  // of all sections and servers
  Encoders<uint32_t> blocks;
  Encoders<uint32_t> flags;                 // a word per section
  Encoders<std::vector<NormRange>> ranges;  // of every instance

  uint32_t peer(uint32_t i) const { return (me + i) % ranks; }
  // The chunk that a rank serves.
  uint32_t chunk(uint32_t rank) const { return shard * ranks + rank; }
  uint64_t shard_begin() const { return shard * layout.shard_elements(); }
  // A segment of the result, and of what is there for the shard alone.
  Region result_of(const LayoutSegment& s) const {
    return {r.slots.bits, unit.bytes_of(s.begin), unit.bytes_of(s.count)};
  }
  Region payload_of(uint32_t slot, const LayoutSegment& s) const {
    return {slot, unit.bytes_of(s.begin - shard_begin()), unit.bytes_of(s.count)};
  }
};

// One section on its way.
struct SectionRun {
  Exchange& x;
  uint32_t index;
  const LayoutSection& at;
  uint32_t round1, round2;
  uint32_t in = kNoSlot;  // EncodeTarget::in

  uint64_t scales() const { return at.message_bytes / 4 - 1; }
  // Of the chunk that a rank serves.
  std::vector<LayoutSegment> segments(uint32_t rank) const {
    return x.layout.segments(index, x.chunk(rank), x.segment);
  }
  uint64_t message_offset(uint32_t rank) const {
    return at.message_offset + x.chunk(rank) * at.message_bytes;
  }
  // Of all ranks.
  OperandRef messages(uint32_t slot) const {
    return whole(slot, Access::kRead, message_offset(0), at.message_bytes * x.ranks);
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
      std::vector<Piece> pieces = x.layout.worker_pieces(x.chunk(k), segment);
      if (x.r.late != nullptr) x.r.late->need(pieces);
      for (Piece& piece : pieces) piece.flat -= x.shard_begin();
      x.r.encode(std::move(pieces), {s.in, x.shard_begin(), to, x.blocks.worker, x.flags.worker,
                                     uint64_t{4} * s.index});
      if (k != x.me) x.b.send(static_cast<int32_t>(k), x.payload_of(x.outgoing, segment), s.round1);
    }
  }
  for (uint32_t i = 1; i < x.ranks; ++i) {
    const uint32_t from = x.peer(i);
    for (LayoutSegment segment : s.segments(x.me)) {
      segment.begin +=
          x.layout.chunk_begin(s.at, x.chunk(from)) - x.layout.chunk_begin(s.at, x.chunk(x.me));
      x.b.recv(static_cast<int32_t>(from), x.payload_of(x.rows, segment), s.round1);
    }
  }
  x.b.stage(Stage::kOther);
}

// Scales into state and into this rank's message, with the flags; then the messages of all ranks.
void exchange_scales(SectionRun& s, const ScaleSlots& slots, const std::vector<NormRange>& all,
                     const KernelOptions& options, uint32_t round) {
  Exchange& x = s.x;
  emit_scales(x.b, x.layout, s.index, slots, all, s.message_offset(x.me), x.r.scale, options);
  for (uint32_t i = 1; i < x.ranks; ++i) {
    x.b.send(static_cast<int32_t>(x.peer(i)),
             {slots.messages, s.message_offset(x.me), s.at.message_bytes}, round,
             MessageClass::kMetadata);
  }
  for (uint32_t i = 1; i < x.ranks; ++i) {
    const uint32_t from = x.peer(i);
    x.b.recv(static_cast<int32_t>(from),
             {slots.messages, s.message_offset(from), s.at.message_bytes}, round,
             MessageClass::kMetadata);
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
  const GateArgs args{0, x.layout.servers(), fail_word,
                      x.b.keep_array(std::span<const uint64_t>(sections)), sections.size()};
  return emit_gate(x.b, whole(messages, Access::kRead, 0, x.layout.message_bytes()), prior, args);
}

ServerRun server_run(const SectionRun& s, const LayoutSegment& segment) {
  const Exchange& x = s.x;
  OperandRef rows = payload_operand(x.rows, Access::kRead, x.unit, 0,
                                    x.unit.bytes_of(s.at.flat_begin - s.at.server_begin));
  rows.footprint = Footprint::kRows;
  rows.rows = x.ranks;
  rows.row_bytes = x.unit.bytes_of(s.at.chunk);
  const uint32_t chunk = x.chunk(x.me);
  return {.pieces = x.layout.server_pieces(chunk, segment),
          .rows = rows,
          .shift = x.layout.chunk_begin(s.at, chunk) - s.at.server_begin,
          .scales = s.scales(),
          .messages = s.messages(x.worker_messages),
          .sums = blocks(x.blocks.server, Access::kWrite),
          .flags = whole(x.flags.server, Access::kReadWrite, 4 * s.index, 4)};
}

// Sums the rows, re-encodes, sends the own chunk's result to everybody and receives theirs.
void serve(SectionRun& s, const KernelOptions& options) {
  Exchange& x = s.x;
  x.b.stage(Stage::kGather);
  for (const LayoutSegment& segment : s.segments(x.me)) {
    x.coding.serve(x.b, x.r, server_run(s, segment), options);
    for (uint32_t i = 1; i < x.ranks; ++i)
      x.b.send(static_cast<int32_t>(x.peer(i)), x.result_of(segment), s.round2);
  }
  for (uint32_t i = 1; i < x.ranks; ++i) {
    const uint32_t from = x.peer(i);
    for (const LayoutSegment& segment : s.segments(from))
      x.b.recv(static_cast<int32_t>(from), x.result_of(segment), s.round2);
  }
  x.b.stage(Stage::kOther);
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
    for (uint32_t k = 0; k < layout.servers(); ++k) {
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
  const uint32_t ranks = layout.servers_per_shard();
  const uint32_t server = server_of(r.levels, r.rank);
  const bool has_shard = serves(r.levels, r.rank);
  const uint64_t payload = has_shard ? unit.bytes_of(layout.shard_elements()) : 0;
  Exchange x{b,
             r,
             layout,
             *coding_of(r.kind).servers(),
             unit,
             ranks,
             server % ranks,
             server / ranks,
             segment_elements(r.segment_bytes, std::max(1u, unit.bytes * 8 / unit.elements)),
             b.scratch(at_least_one(payload)),
             b.scratch(at_least_one(payload)),
             b.scratch(at_least_one(layout.message_bytes())),
             {b.scratch(at_least_one(layout.worker_blocks() * 4)),
              b.scratch(at_least_one(layout.server_blocks() * 4))},
             {r.worker_flags != kNoSlot ? r.worker_flags : add_worker_flags(b, layout),
              b.scratch(at_least_one(layout.sections().size() * 4))},
             {}};
  if (!has_shard) return x;
  x.ranges.worker = layout.worker_ranges(x.shard);
  x.ranges.server = layout.server_ranges(server);
  return x;
}

// One section between the ranks that serve it. Returns the word of those ranks about what they have
// encoded; codecs without scales have one for all sections instead (kNoSlot).
uint32_t emit_section(SectionRun& s) {
  Exchange& x = s.x;
  const CompressedSlots& slots = x.r.slots;
  encode_and_send(s);
  exchange_scales(
      s,
      {x.blocks.worker, slots.worker_counts, slots.worker_scale, x.worker_messages, x.flags.worker},
      x.ranges.worker, {}, s.round1);
  uint32_t gate = kNoSlot;
  KernelOptions server;
  server.lane = kServerLane;
  if (codec_row(x.r.kind).scales) {
    const GateArgs args{s.at.message_bytes, x.ranks, kSkipNonfinite};
    gate = emit_gate(x.b, s.messages(x.worker_messages), x.r.prior, args);
    server.predicate = {gate, 0, kCommit};
  }
  serve(s, server);
  exchange_scales(s,
                  {x.blocks.server, slots.server_counts, slots.server_scale_next, slots.messages,
                   x.flags.server},
                  x.ranges.server, server, s.round2);
  return gate;
}

void emit_one_level(Exchange& x, CompressedResult* result) {
  const auto n = static_cast<uint32_t>(x.layout.sections().size());
  const uint32_t first = x.b.next_round();
  x.b.reserve_rounds(first + 2 * n);
  const std::vector<uint32_t> order = section_order(x.r);
  for (uint32_t i = 0; i < n; ++i) {
    // On transports that match by order the first exchange of a section comes before the second of
    // the section before it.
    SectionRun s{x, order[i], x.layout.sections()[order[i]], first + (i == 0 ? 0 : 2 * i - 1),
                 first + std::min(2 * i + 2, 2 * n - 1)};
    result->gate_workers = emit_section(s);
  }
  if (n != 1 || result->gate_workers == kNoSlot)
    result->gate_workers = gate_all(x, x.worker_messages, x.r.prior, kSkipNonfinite);
}

// The ranks of a host give each other what their shards have become, with the messages of all who
// have served them.
void share_in_host(SectionRun& s) {
  Exchange& x = s.x;
  const Levels& levels = *x.r.levels;
  const auto share = [&](int32_t me, int32_t size) {
    const uint32_t round = x.b.next_round();
    x.b.reserve_rounds(round + 1);
    // Shards of this host: those that `from` has, to the others or from them.
    const auto pass = [&](uint32_t from, const auto& move) {
      const uint32_t own = std::exchange(x.shard, from);
      for (uint32_t k = 0; k < x.ranks; ++k) {
        for (const LayoutSegment& segment : s.segments(k))
          move(x.result_of(segment), MessageClass::kPayload);
      }
      for (const uint32_t slot : {x.worker_messages, x.r.slots.messages}) {
        move(Region{slot, s.message_offset(0), s.at.message_bytes * x.ranks},
             MessageClass::kMetadata);
      }
      x.shard = own;
    };
    x.b.stage(Stage::kGather);
    for (int32_t i = 1; i < size; ++i) {
      const int32_t peer = (me + i) % size;
      if (levels.serves(x.r.rank)) {
        pass(x.shard, [&](const Region& data, MessageClass c) { x.b.send(peer, data, round, c); });
      }
    }
    for (int32_t i = 1; i < size; ++i) {
      const int32_t peer = (me + i) % size;
      if (static_cast<uint32_t>(peer) < levels.shards()) {
        pass(static_cast<uint32_t>(peer),
             [&](const Region& data, MessageClass c) { x.b.recv(peer, data, round, c); });
      }
    }
    x.b.stage(Stage::kOther);
    return ok_status();
  };
  (void)x.b.within(levels.hosts, x.r.rank, share);  // `share` does not fail
}

void emit_two_levels(Exchange& x, CompressedResult* result) {
  const Levels& levels = *x.r.levels;
  HostMean mean(x.b, x.r);
  for (const uint32_t index : section_order(x.r)) {
    mean.emit(index);
    const uint32_t round = x.b.next_round();
    SectionRun s{x, index, x.layout.sections()[index], round, round + 1, mean.list()};
    x.b.reserve_rounds(round + 2);
    if (levels.serves(x.r.rank)) {
      (void)x.b.within(levels.columns, x.r.rank, [&](int32_t, int32_t) {
        emit_section(s);
        return ok_status();
      });
    }
    share_in_host(s);
  }
  result->gate_workers = gate_all(x, x.worker_messages, x.r.prior, kSkipNonfinite);
}

}  // namespace

void emit_server_reset(PlanBuilder& b, const CompressedLayout& layout, const CompressedSlots& slots,
                       uint32_t gate) {
  const auto reset = [&](uint32_t slot, uint64_t bytes) {
    if (slot == kNoSlot) return;
    UndoStep undo;
    undo.step = b.detached_fill({slot, 0, bytes}, 0);
    undo.step.predicate = {gate, 0, kSkipServer};
    undo.pair_first = undo.pair_last = b.steps() - 1;
    undo.only_if_paired_ran = true;
    b.undo(std::move(undo));
  };
  reset(slots.server, layout.chunk_elements() * 4);
  reset(slots.server_scale, layout.instances() * 4);
}

void emit_scales(PlanBuilder& b, const CompressedLayout& layout, uint32_t section,
                 const ScaleSlots& slots, std::span<const NormRange> all, uint64_t message_offset,
                 ScaleKind kind, const KernelOptions& options) {
  const LayoutSection& at = layout.sections()[section];
  OperandRef sums = absent(), counts = absent(), scale = absent();
  std::vector<NormRange> ranges;
  if (at.message_bytes != scale_message_bytes(0)) {
    const std::span<const NormRange> own = all.subspan(at.first_instance, at.instances);
    ranges.assign(own.begin(), own.end());
    const uint64_t first = ranges.front().first_block;
    const uint64_t end = ranges.back().first_block + ranges.back().blocks;
    for (NormRange& range : ranges) range.first_block -= first;
    sums = whole(slots.blocks, Access::kRead, first * 4, (end - first) * 4);
    counts = whole(slots.counts, Access::kRead, at.first_instance * 8, ranges.size() * 8);
    scale = whole(slots.scale, Access::kWrite, at.first_instance * 4, ranges.size() * 4);
  }
  b.kernel<kernels::NormFinish>(
      {.sums = sums,
       .counts = counts,
       .scales = scale,
       .message = whole(slots.messages, Access::kWrite, message_offset, at.message_bytes),
       .flags = whole(slots.flags, Access::kReadWrite, 4 * section, 4)},
      {}, NormArgs{b.keep_array(std::span<const NormRange>(ranges)), ranges.size(), kind}, options);
}

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
                                const CodecSettings& codec, bool serves, bool state_copied) {
  const bool has_scales = codec.row().scales;
  const auto errors = [&](uint64_t elements) {
    return codec.residual ? b.bound(elements * 4) : kNoSlot;
  };
  const auto per_instance = [&](uint64_t bytes) {
    return has_scales ? b.bound(layout.instances() * bytes) : kNoSlot;
  };
  // What encoders change.
  const auto of_workers = [&](uint64_t bytes) {
    return state_copied ? bound_with_copy(b, bytes) : b.bound(bytes);
  };
  const auto result = [&](uint64_t bytes) {
    return has_scales ? b.bound(bytes) : b.scratch(bytes);
  };
  CompressedSlots s;
  if (!codec.row().sparse) {
    s.bits = result(codec.unit().bytes_of(layout.compressed_elements()));
    s.messages = result(layout.message_bytes());
  }
  if (!serves) return s;
  if (codec.residual) s.worker = of_workers(layout.shard_elements() * 4);
  if (!codec.has_servers()) return s;
  if (has_scales) s.worker_scale = of_workers(layout.instances() * 4);
  s.server = errors(layout.chunk_elements());
  s.server_scale = per_instance(4);
  s.server_next = errors(layout.chunk_elements());
  s.server_scale_next = per_instance(4);
  s.worker_counts = per_instance(8);
  s.server_counts = per_instance(8);
  return s;
}

CompressedResult emit_compressed_all_reduce(PlanBuilder& b, const CompressedRequest& r) {
  Exchange x = make_exchange(b, r);
  b.fill({x.flags.server, 0, x.layout.sections().size() * 4}, 0);
  CompressedResult result;
  result.worker_messages = x.worker_messages;
  r.levels == nullptr ? emit_one_level(x, &result) : emit_two_levels(x, &result);
  result.gate = gate_all(x, r.slots.messages, {result.gate_workers, 0, kCommit}, kSkipServer);
  emit_server_reset(b, x.layout, r.slots, result.gate);
  if (!r.state_copied && r.slots.worker != kNoSlot) x.coding.undo(b, r);
  return result;
}

}  // namespace sotto
