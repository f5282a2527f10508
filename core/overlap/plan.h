// The plan of a round: one operation whose inputs are buckets, which open one after the other, and
// last of all what ranks tell each other.
//
// Every bucket is an all-reduce in place, in rounds of its own, so its messages go as soon as its
// input is there, whatever is missing of others. Behind the last input ranks exchange a message
// each (core/plan/late_inputs.h).
//
// With a codec a bucket is compressed on its own, and its state comes back unless all ranks commit.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/codec/compressed.h"
#include "core/overlap/buckets.h"
#include "core/plan/late_inputs.h"

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
  const Levels* levels = nullptr;         // of averages; null: one level
  ReduceOp reduce = ReduceOp::kMean;
  bool observes = false;  // ranks learn in which order gradients became ready on rank 0
  MessageSizes sizes = {.segment_bytes = 256 * 1024};
};

// Where the scale messages of a bucket are in the verdict, in bytes.
struct BucketVerdict {
  uint64_t workers = 0, servers = 0;
};

struct OverlapPlan {
  LogicalPlan plan;
  // Input b is bucket b; its slots are those of its gradients, in the bucket's order.
  std::vector<uint32_t> slots;  // by gradient
  RoundEnd end;                 // its order: uint32 for each gradient
  // In the verdict, in bytes: the order of rank 0, if ranks learn it, and the messages of all
  // ranks.
  uint64_t order_of_rank_0 = 0, order_bytes = 0;
  uint64_t messages = 0;
  // With a codec, by bucket.
  std::vector<CompressedSlots> codecs;
  std::vector<BucketVerdict> verdicts;
};
Result<OverlapPlan> build_overlap_round(const OverlapShape& shape);

// Zeros in memory that a run binds: slots [0, n).
LogicalPlan build_zeros(std::span<const uint64_t> bytes);

}  // namespace sotto
