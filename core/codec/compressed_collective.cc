// The mean over ranks with every codec, and the plain collective.
#include "core/codec/coding.h"
#include "core/codec/compressed.h"
#include "core/plan/layout.h"

namespace sotto {
namespace {

void decode_all(PlanBuilder& b, const ServerCoding& coding, const CompressedMeanRequest& r,
                const CompressedMean& mean) {
  const CompressedLayout& layout = *r.layout;
  const PayloadUnit unit = r.codec.unit();
  KernelOptions options;
  if (r.commits) {
    options.predicate = {mean.exchange.gate, 0, kCommit};
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
        coding.decode(b, r, mean.slots, std::move(pieces), options);
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
                               serves(request.levels, request.rank), request.kept);
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
  r.kept = request.kept;
  r.encode = [&](std::vector<Piece> pieces, const EncodeTarget& to) {
    encode(b, request, mean.slots, std::move(pieces), to);
  };
  mean.exchange = emit_compressed_all_reduce(b, r);
  decode_all(b, *this, request, mean);
  return mean;
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
