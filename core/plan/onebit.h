// The error-compensated 1-bit all-reduce as a plan (specification section 1): encode and send chunk
// by chunk, exchange worker scales, reduce and re-encode the own chunk, send it to all, exchange
// server scales. What is encoded and what is done with the result is the caller's: a plain
// collective decodes, an optimizer updates from the bits.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/codec/onebit_layout.h"
#include "core/plan/builder.h"

namespace sotto {

// Slots of the state and of the result. All are bound slots except where noted.
struct OnebitSlots {
  uint32_t worker = kNoSlot;         // c: flat_elements float32
  uint32_t worker_scale = kNoSlot;   // S: float32 per instance
  uint32_t server = kNoSlot;         // c of the server: chunk_elements float32
  uint32_t server_scale = kNoSlot;   // R of the own chunk: float32 per instance
  uint32_t worker_counts = kNoSlot;  // uint64 per instance
  uint32_t server_counts = kNoSlot;  // uint64 per instance
  uint32_t valid = kNoSlot;          // bits, flat_elements; kNoSlot: no mask
  uint32_t bits = kNoSlot;           // result bits, flat_elements
  uint32_t messages = kNoSlot;       // result scale messages, one per rank
};

// Where an encoder is to put its output.
struct OnebitEncodeTarget {
  uint32_t bits = kNoSlot;
  uint64_t bits_base = 0;
  uint32_t blocks = kNoSlot;  // worker block sums
  uint32_t flags = kNoSlot;
};

struct OnebitRequest {
  int32_t rank = 0;
  const OnebitLayout* layout = nullptr;
  ScaleKind scale = ScaleKind::kL2;
  OnebitSlots slots;
  Predicate prior;  // an earlier decision that must be kCommit too; no slot: none
  uint64_t segment_bytes = 256 * 1024;
  // Emits the encoder of one run and its undo.
  std::function<void(std::vector<Piece> pieces, const OnebitEncodeTarget& to)> encode;
};

struct OnebitResult {
  uint32_t worker_messages = kNoSlot;  // scratch: scale messages of all workers
  uint32_t gate_workers = kNoSlot;     // word: no worker met a non-finite value
  uint32_t gate =
      kNoSlot;  // word: all may commit; written after every message has arrived and verified
};

// Uses rounds builder.next_round() and the one after it.
OnebitResult emit_onebit_all_reduce(PlanBuilder& builder, const OnebitRequest& request);

// Undo of the worker residual's new representation: S = 0. To be emitted after the encoders' undo
// steps.
void emit_onebit_scale_undo(PlanBuilder& builder, const OnebitRequest& request);

// The plain collective: encodes the tensors of slots [in, in + n), decodes into [out, out + n).
struct OnebitCollective {
  OnebitSlots slots;
  uint32_t in = kNoSlot, out = kNoSlot;
  uint32_t verdict = kNoSlot;  // host: word, then worker messages, then server messages
};
OnebitCollective emit_onebit_collective(PlanBuilder& builder, int32_t rank,
                                        const OnebitLayout& layout, ScaleKind scale,
                                        const std::vector<uint8_t>& in_place,
                                        uint64_t segment_bytes);

// Adds the bound slots for a layout.
OnebitSlots add_onebit_slots(PlanBuilder& builder, const OnebitLayout& layout, bool masked);

}  // namespace sotto
