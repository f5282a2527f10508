// The compressed all-reduce as a plan (specification section 1, and the same exchange for casts and
// blockwise integers): encode and send chunk by chunk, exchange worker scales and flags, reduce and
// re-encode the own chunk, send it to all, exchange server scales and flags. What is encoded and
// what is done with the result is the caller's: a plain collective decodes, an optimizer updates
// from the bits.
//
// Sections of the layout are independent of each other up to the last decision: section i + 1 is
// encoded while section i travels. Server state is written beside the current one, so an operation
// that does not commit leaves it as it was. The exception is kSkipServer: there the state itself
// may be what makes sums overflow, for ever, so every rank sets it to 0.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/codec/compressed_layout.h"
#include "core/plan/builder.h"

namespace sotto {

// Slots of the state and of the result. All are bound slots except where noted.
struct CompressedSlots {
  uint32_t worker = kNoSlot;        // with scales: c, else e: compressed_elements float32
  uint32_t worker_scale = kNoSlot;  // S: float32 per instance
  uint32_t server = kNoSlot;        // the same of the server: chunk_elements float32
  uint32_t server_scale = kNoSlot;  // R of the own chunk: float32 per instance
  uint32_t server_next = kNoSlot;   // what they become
  uint32_t server_scale_next = kNoSlot;
  uint32_t worker_counts = kNoSlot;  // uint64 per instance
  uint32_t server_counts = kNoSlot;  // uint64 per instance
  uint32_t valid = kNoSlot;          // bits, flat_elements; kNoSlot: no mask
  uint32_t bits = kNoSlot;           // result payload of compressed_elements
  uint32_t messages = kNoSlot;       // result: message area
};

// Where an encoder is to put its output.
struct EncodeTarget {
  uint32_t bits = kNoSlot;    // payload
  uint64_t bits_base = 0;     // flat index of its first element
  uint32_t blocks = kNoSlot;  // worker block sums
  uint32_t flags = kNoSlot;
  uint64_t flags_offset = 0;
};

struct CompressedRequest {
  int32_t rank = 0;
  const CompressedLayout* layout = nullptr;
  ScaleKind scale = ScaleKind::kL2;
  CompressedSlots slots;
  // A word per section (add_worker_flags), in which this rank's other work of the operation raises
  // kFlagNonfinite too; kNoSlot: there is none.
  uint32_t worker_flags = kNoSlot;
  Predicate prior;  // an earlier decision that must be kCommit too; no slot: none
  uint64_t segment_bytes = 256 * 1024;
  CodecKind kind = CodecKind::kOnebit;
  uint32_t block = 0;  // of codecs with blocks
  // Emits the encoder of one run and its undo.
  std::function<void(std::vector<Piece> pieces, const EncodeTarget& to)> encode;
};

struct CompressedResult {
  uint32_t worker_messages = kNoSlot;  // scratch: message area of all workers
  uint32_t gate_workers = kNoSlot;     // word: no worker met a non-finite value
  uint32_t gate = kNoSlot;             // word: all may commit
};

// Uses rounds from builder.next_round() on, two per section.
CompressedResult emit_compressed_all_reduce(PlanBuilder& builder, const CompressedRequest& request);

// Encodes float32 tensors and decodes their mean, with every codec.
struct CompressedMeanRequest {
  int32_t rank = 0;
  const CompressedLayout* layout = nullptr;
  CodecSettings codec;
  uint32_t in = kNoSlot, out = kNoSlot;  // lists of slots, one per tensor, which may be the same
  // Codecs with scales: elements that take part, flat bits; the others are 0 in `out`. kNoSlot: all
  // do.
  uint32_t valid = kNoSlot;
  // The result is the caller's memory and written only if all ranks may commit. Otherwise it is
  // written as it arrives, and worth nothing unless CompressedResult::gate says kCommit.
  bool commits = false;
  uint64_t segment_bytes = 256 * 1024;
};
struct CompressedMean {
  CompressedSlots slots;
  CompressedResult exchange;
};
CompressedMean emit_compressed_mean(PlanBuilder& builder, const CompressedMeanRequest& request);

// The plain collective: encodes the tensors of slots [in, in + n), decodes into [out, out + n).
struct CompressedCollective {
  CompressedSlots slots;
  uint32_t in = kNoSlot, out = kNoSlot;
  uint32_t verdict = kNoSlot;  // host: word, then (at 8) worker message area, then that of servers
};
CompressedCollective emit_compressed_collective(PlanBuilder& builder, int32_t rank,
                                                const CompressedLayout& layout,
                                                const CodecSettings& codec,
                                                std::span<const uint8_t> in_place,
                                                uint64_t segment_bytes);

// A list of bound slots for the tensors of a layout, followed by zeros for padding that is data.
uint32_t add_padded_list(PlanBuilder& builder, const CompressedLayout& layout, Dtype type);

// Scratch for CompressedRequest::worker_flags, 0.
uint32_t add_worker_flags(PlanBuilder& builder, const CompressedLayout& layout);

// Adds the slots of a codec's state and result for a layout. Results with scales are kept: bound.
CompressedSlots add_codec_slots(PlanBuilder& builder, const CompressedLayout& layout,
                                const CodecSettings& codec);
// Of 1 bit.
inline CompressedSlots add_onebit_slots(PlanBuilder& builder, const CompressedLayout& layout) {
  return add_codec_slots(builder, layout, {});
}

}  // namespace sotto
