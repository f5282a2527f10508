// The compressed all-reduce as a plan (specification section 1, and the same exchange for casts and
// blockwise integers): encode and send chunk by chunk, exchange worker scales and flags, reduce and
// re-encode the own chunk, send it to all, exchange server scales and flags. What is encoded and
// what is done with the result is the caller's: a plain collective decodes, an optimizer updates
// from the bits.
//
// Sections of the layout are independent of each other up to the last decision: section i + 1 is
// encoded while section i travels. In two levels (plan/levels.h; specification 1.11, H1 and H2) the
// ranks of a host average a section in full precision first, and in the end give each other what
// their shards have become: bits, and the messages of all who have served them. So all ranks decide
// alike, and what is done with the result is the same.
//
// Server state is written beside the current one, so an operation that does not commit leaves it as
// it was. The exception is kSkipServer: there the state itself may be what makes sums overflow, for
// ever, so every rank sets it to 0.
#pragma once

#include <cstdint>
#include <span>

#include "core/codec/compressed_layout.h"
#include "core/codec/compressed_request.h"
#include "core/plan/builder.h"

namespace sotto {

// Uses rounds from builder.next_round() on, in one level two per section.
CompressedResult emit_compressed_all_reduce(PlanBuilder& builder, const CompressedRequest& request);

CompressedMean emit_compressed_mean(PlanBuilder& builder, const CompressedMeanRequest& request);

// What this rank's payload says of `in`, into `out`: encoded as the next mean will encode it, and
// decoded. Error feedback stays. In one level; request.weights are of this rank alone. Returns the
// slots of the state that is read.
CompressedSlots emit_own_payload(PlanBuilder& builder, const CompressedMeanRequest& request);

// Where a section's scales come from and go to: slots. scale: of every instance.
struct ScaleSlots {
  uint32_t blocks, counts, scale, messages, flags;
};
// Emits the scales of a section from block sums, and the message at `message_offset` with them and
// the section's flags. all: norm ranges of every instance.
void emit_scales(PlanBuilder& builder, const CompressedLayout& layout, uint32_t section,
                 const ScaleSlots& slots, std::span<const NormRange> all, uint64_t message_offset,
                 ScaleKind kind, const KernelOptions& options);

// Every rank drops its server residual when the sums of one were not finite. The last step has made
// the decision `gate`.
void emit_server_reset(PlanBuilder& builder, const CompressedLayout& layout,
                       const CompressedSlots& slots, uint32_t gate);

// The plain collective: encodes the tensors of slots [in, in + n), decodes into [out, out + n).
struct CompressedCollective {
  CompressedSlots slots;
  uint32_t in = kNoSlot, out = kNoSlot;
  uint32_t verdict = kNoSlot;  // host: word, then (at 8) worker message area, then that of servers
};
// levels: null: one level.
CompressedCollective emit_compressed_collective(
    PlanBuilder& builder, int32_t rank, const CompressedLayout& layout, const CodecSettings& codec,
    std::span<const uint8_t> in_place, uint64_t segment_bytes, const Levels* levels = nullptr);

// A list of bound slots for the tensors of a layout, followed by zeros for padding that is data.
uint32_t add_padded_list(PlanBuilder& builder, const CompressedLayout& layout, Dtype type);

// Scratch for CompressedRequest::worker_flags, 0.
uint32_t add_worker_flags(PlanBuilder& builder, const CompressedLayout& layout);

// Adds the slots of a codec's state and result for a layout. Results with scales outlive the
// operation: bound. serves: this rank has a shard. state_copied: as CompressedRequest has it.
CompressedSlots add_codec_slots(PlanBuilder& builder, const CompressedLayout& layout,
                                const CodecSettings& codec, bool serves = true,
                                bool state_copied = false);
// Of 1 bit.
inline CompressedSlots add_onebit_slots(PlanBuilder& builder, const CompressedLayout& layout,
                                        bool serves, bool state_copied) {
  return add_codec_slots(builder, layout, {}, serves, state_copied);
}

}  // namespace sotto
