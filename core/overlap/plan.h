// The plan of a round: one operation whose inputs are buckets, which open one after the other, and
// last of all what ranks tell each other.
//
// Every bucket is an all-reduce in place, in rounds of its own, so its messages go as soon as its
// input is there, whatever is missing of others. Behind the last input ranks exchange a message
// each: a rank that gives the round up says so there, and the decision of all is not to commit. So
// the round of a rank that gives up has the same messages as any other, and the group stays
// healthy.
//
// With a codec a bucket is compressed on its own. What it encodes is a copy, since undo cannot use
// inputs, which may be missing; what it decodes goes to the gradients.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/codec/compressed.h"
#include "core/overlap/buckets.h"
#include "core/plan/builder.h"

namespace sotto {

// Layouts of buckets that are compressed.
struct OverlapCoding {
  CodecSettings settings;
  std::vector<const CompressedLayout*> layouts;  // by bucket
};

struct OverlapShape {
  int32_t rank = 0;
  int32_t size = 1;
  std::span<const OverlapTensor> tensors;
  std::span<const OverlapBucket> buckets;
  std::optional<Dtype> wire;
  const OverlapCoding* coding = nullptr;  // null: gradients are not compressed
  ReduceOp reduce = ReduceOp::kMean;
  bool observes = false;  // ranks learn in which order gradients became ready on rank 0
  MessageSizes sizes = {.segment_bytes = 256 * 1024};
};

// Of one rank, at the end of a round.
struct RoundMessage {
  char reason[252] = {};   // text that ends with a zero; of a rank that withdraws
  uint32_t withdrawn = 0;  // 0 or 1; last, as Gate has it
};
static_assert(sizeof(RoundMessage) == 256);

// Where the scale messages of a bucket are in the verdict, in bytes.
struct BucketVerdict {
  uint64_t workers = 0, servers = 0;
};

struct OverlapPlan {
  LogicalPlan plan;
  // Input b is bucket b; its slots are those of its gradients, in the bucket's order.
  std::vector<uint32_t> slots;  // by gradient
  // Host, a RoundMessage: the last input.
  uint32_t told = kNoSlot;
  // Host, a part of that input: uint32 for each gradient, the order on this rank. kNoSlot: ranks do
  // not learn it.
  uint32_t order = kNoSlot;
  uint64_t order_of_rank_0 = 0;  // where it is in the verdict, in bytes
  // Where the messages of all ranks begin in the verdict, in bytes; by rank.
  uint64_t messages = 0;
  // With a codec, by bucket.
  std::vector<CompressedSlots> codecs;
  std::vector<BucketVerdict> verdicts;
};
Result<OverlapPlan> build_overlap_round(const OverlapShape& shape);

// Zeros in memory that a run binds: slots [0, n).
LogicalPlan build_zeros(std::span<const uint64_t> bytes);

}  // namespace sotto
