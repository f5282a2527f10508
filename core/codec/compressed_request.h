// What a compressed all-reduce is to do, and its slots.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/codec/compressed_layout.h"
#include "core/plan/late_inputs.h"
#include "core/plan/levels.h"

namespace sotto {

// Slots of the state and of the result. All are bound slots except where noted.
struct CompressedSlots {
  uint32_t worker = kNoSlot;         // with scales: c, else e: shard_elements float32
  uint32_t worker_scale = kNoSlot;   // S: float32 per instance
  uint32_t launch_worker = kNoSlot;  // where both are kept before an operation changes them
  uint32_t launch_scale = kNoSlot;
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

// What an encoder reads, and where it is to put its output. Its pieces count flat elements from the
// beginning of this rank's shard.
struct EncodeTarget {
  uint32_t in = kNoSlot;      // two levels: list of the host's mean; kNoSlot: what the caller has
  uint64_t shard_begin = 0;   // in the flat space
  uint32_t bits = kNoSlot;    // payload of the shard
  uint32_t blocks = kNoSlot;  // worker block sums
  uint32_t flags = kNoSlot;
  uint64_t flags_offset = 0;
};

struct CompressedRequest {
  int32_t rank = 0;
  const CompressedLayout* layout = nullptr;
  // Two levels: ranks of a host average `host_in` in full precision, and what is encoded is that.
  const Levels* levels = nullptr;  // null: one level
  uint32_t host_in = kNoSlot;      // list of float32, one slot per tensor
  ScaleKind scale = ScaleKind::kL2;
  CompressedSlots slots;
  // A word per section (add_worker_flags), in which this rank's other work of the operation raises
  // kFlagNonfinite too; kNoSlot: there is none.
  uint32_t worker_flags = kNoSlot;
  Predicate prior;  // an earlier decision that must be kCommit too; no slot: none
  uint64_t segment_bytes = 256 * 1024;  // 0: messages are not cut
  CodecKind kind = CodecKind::kOnebit;
  uint32_t block = 0;  // of codecs with blocks
  // Not null: what is encoded is inputs that arrive. Sections go in the order in which what they
  // need arrives.
  const LateInputs* late = nullptr;
  bool state_copied = false;  // what encoders change comes back without them (bound_with_copy)
  // Emits the encoder of one run and its undo.
  std::function<void(std::vector<Piece> pieces, const EncodeTarget& to)> encode;
};

// Of every rank whether it counts in the mean: a float32, 0 or not. The first one lies at `offset`,
// the others each `stride` bytes behind the one before.
struct RankWeights {
  uint32_t slot = kNoSlot;  // kNoSlot: all count
  uint64_t offset = 0;
  uint32_t stride = 0;
};

struct CompressedResult {
  uint32_t worker_messages = kNoSlot;  // scratch: message area of all workers, by server
  uint32_t gate_workers = kNoSlot;     // word: no worker met a non-finite value
  uint32_t gate = kNoSlot;             // word: all may commit
};

// Encodes float32 tensors and decodes their mean, with every codec.
struct CompressedMeanRequest {
  int32_t rank = 0;
  const CompressedLayout* layout = nullptr;
  CodecSettings codec;
  uint32_t in = kNoSlot, out = kNoSlot;  // lists of slots, one per tensor, which may be the same
  const Levels* levels = nullptr;        // null: one level
  // Codecs with scales: elements that take part, flat bits; the others are 0 in `out`. kNoSlot: all
  // do.
  uint32_t valid = kNoSlot;
  // Sparse codecs leave out ranks that do not count, also in what sums are divided by. For others
  // their tensors are zeros.
  RankWeights weights{};
  // The result is the caller's memory and written only if all ranks may commit. Otherwise it is
  // written as it arrives, and worth nothing unless CompressedResult::gate says kCommit.
  bool commits = false;
  uint64_t segment_bytes = 256 * 1024;  // 0: messages are not cut
  const LateInputs* late = nullptr;     // as CompressedRequest::late
  bool state_copied = false;            // as CompressedRequest::state_copied
};

struct CompressedMean {
  CompressedSlots slots;
  CompressedResult exchange;
};

}  // namespace sotto
