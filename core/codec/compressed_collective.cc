// The mean over ranks with every codec, and the plain collective.
#include "core/codec/coding.h"
#include "core/codec/compressed.h"
#include "core/plan/layout.h"

namespace sotto {
namespace {

// gate: that a commit waits for.
void decode_all(PlanBuilder& b, const ServerCoding& coding, const CompressedMeanRequest& r,
                const CompressedSlots& slots, uint32_t gate) {
  const CompressedLayout& layout = *r.layout;
  const PayloadUnit unit = r.codec.unit();
  KernelOptions options;
  if (r.commits) {
    options.predicate = {gate, 0, kCommit};
    options.phase = Phase::kCommitting;
  }
  const uint64_t segment =
      segment_elements(r.segment_bytes, std::max(1u, unit.bytes * 8 / unit.elements));
  for (uint32_t s = 0; s < layout.sections().size(); ++s) {
    for (uint32_t k = 0; k < layout.servers(); ++k) {
      for (const LayoutSegment& run : layout.segments(s, k, segment)) {
        std::vector<Piece> pieces = layout.worker_pieces(k, run);
        // Neither padding nor padding that is data.
        std::erase_if(pieces, [&](const Piece& p) { return p.tensor >= layout.tensors().size(); });
        coding.decode(b, r, slots, std::move(pieces), options);
      }
    }
  }
}

}  // namespace

CompressedMean emit_compressed_mean(PlanBuilder& b, const CompressedMeanRequest& request) {
  return coding_of(request.codec.kind).mean(b, request);
}

CompressedMean ServerCoding::mean(PlanBuilder& b, const CompressedMeanRequest& request) const {
  CompressedMean mean;
  mean.slots = add_codec_slots(b, *request.layout, request.codec,
                               serves(request.levels, request.rank), request.state_copied);
  mean.slots.valid = request.valid;
  if (mean.slots.server != kNoSlot) b.committed(mean.slots.server);
  CompressedRequest r;
  r.rank = request.rank;
  r.layout = request.layout;
  r.levels = request.levels;
  r.host_in = request.in;
  r.scale = request.codec.scale;
  r.slots = mean.slots;
  r.segment_bytes = request.segment_bytes;
  r.kind = request.codec.kind;
  r.block = request.codec.block;
  r.late = request.late;
  r.state_copied = request.state_copied;
  r.encode = [&](std::vector<Piece> pieces, const EncodeTarget& to) {
    encode(b, request, mean.slots, std::move(pieces), to);
  };
  mean.exchange = emit_compressed_all_reduce(b, r);
  decode_all(b, *this, request, mean.slots, mean.exchange.gate);
  return mean;
}

CompressedSlots emit_own_payload(PlanBuilder& b, const CompressedMeanRequest& request) {
  return coding_of(request.codec.kind).own_payload(b, request);
}

// As if every server had answered with what this rank has sent it.
CompressedSlots ServerCoding::own_payload(PlanBuilder& b, const CompressedMeanRequest& r) const {
  const CompressedLayout& layout = *r.layout;
  const bool has_scales = r.codec.row().scales;
  CompressedSlots read, own;
  const auto copied = [&b](uint32_t* bound, uint64_t bytes) {
    *bound = b.bound(bytes);
    const uint32_t copy = b.scratch(bytes);
    b.copy({copy, 0, bytes}, {*bound, 0, bytes});
    return copy;
  };
  if (r.codec.residual) own.worker = copied(&read.worker, layout.shard_elements() * 4);
  if (has_scales) {
    own.worker_scale = read.worker_scale = b.bound(layout.instances() * 4);
    own.worker_counts = read.worker_counts = b.bound(layout.instances() * 8);
  }
  own.bits = b.scratch(r.codec.unit().bytes_of(layout.compressed_elements()));
  own.messages = b.scratch(layout.message_bytes());
  const ScaleSlots scales{b.scratch(std::max<uint64_t>(1, layout.worker_blocks() * 4)),
                          own.worker_counts, b.scratch(layout.instances() * 4), own.messages,
                          add_worker_flags(b, layout)};
  CompressedMeanRequest encoded = r;
  encoded.state_copied = true;  // `own` is scratch
  const std::vector<NormRange> ranges = layout.worker_ranges(0);
  for (uint32_t s = 0; s < layout.sections().size(); ++s) {
    for (uint32_t k = 0; k < layout.servers(); ++k) {
      for (const LayoutSegment& run : layout.segments(s, k, segment_elements(0, 1))) {
        encode(b, encoded, own, layout.worker_pieces(k, run),
               {.bits = own.bits,
                .blocks = scales.blocks,
                .flags = scales.flags,
                .flags_offset = uint64_t{4} * s});
      }
    }
    if (!has_scales) continue;
    const LayoutSection& at = layout.sections()[s];
    emit_scales(b, layout, s, scales, ranges, at.message_offset, r.codec.scale, {});
    for (uint32_t k = 1; k < layout.servers(); ++k) {
      b.copy({own.messages, at.message_offset + k * at.message_bytes, at.message_bytes},
             {own.messages, at.message_offset, at.message_bytes});
    }
  }
  decode_all(b, *this, r, own, kNoSlot);
  return read;
}

CompressedCollective emit_compressed_collective(PlanBuilder& b, int32_t rank,
                                                const CompressedLayout& layout,
                                                const CodecSettings& codec,
                                                std::span<const uint8_t> in_place,
                                                uint64_t segment_bytes, const Levels* levels) {
  CompressedCollective c;
  std::vector<uint64_t> bytes;
  for (const LayoutTensor& t : layout.tensors()) bytes.push_back(t.count * 4);
  c.in = add_padded_list(b, layout, Dtype::kF32);
  c.out = b.bound_list(bytes);
  b.committed(c.out, bytes.size());
  for (uint32_t i = 0; i < bytes.size(); ++i) {
    if (in_place[i]) b.alias(c.in + i, c.out + i, 0);
  }
  CompressedMeanRequest r{rank, &layout, codec, c.in, c.out, levels};
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
