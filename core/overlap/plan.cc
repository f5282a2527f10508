#include "core/overlap/plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/plan/collectives.h"
#include "core/plan/layout.h"

namespace sotto {
namespace {

class RoundBuilder {
 public:
  explicit RoundBuilder(const OverlapShape& shape) : x_(shape) {
    out_.slots.resize(shape.tensors.size(), kNoSlot);
  }

  Result<OverlapPlan> build();

 private:
  // Gradients of one dtype of a bucket, which have consecutive slots.
  struct Run {
    Dtype dtype;
    uint32_t first_slot;
    std::vector<uint64_t> counts;
  };

  Status emit_bucket(const OverlapBucket& bucket);
  Status average(const Run& run);
  Status average_as(const Run& run, Dtype wire);
  Status all_reduce(SmallVector<uint64_t> counts, Dtype dtype, uint32_t first_slot);
  void exchange_messages();

  const OverlapShape& x_;
  PlanBuilder b_;
  OverlapPlan out_;
};

Status RoundBuilder::emit_bucket(const OverlapBucket& bucket) {
  std::vector<uint64_t> bytes;
  for (const uint32_t t : bucket.tensors) bytes.push_back(x_.tensors[t].bytes());
  const uint32_t first = b_.bound_list(bytes);
  std::vector<uint32_t> slots(bytes.size());
  std::iota(slots.begin(), slots.end(), first);
  b_.await(slots);
  std::vector<Run> runs;
  for (size_t i = 0; i < slots.size(); ++i) {
    const OverlapTensor& tensor = x_.tensors[bucket.tensors[i]];
    out_.slots[bucket.tensors[i]] = slots[i];
    if (runs.empty() || runs.back().dtype != tensor.dtype)
      runs.push_back({tensor.dtype, slots[i], {}});
    runs.back().counts.push_back(tensor.count);
  }
  if (x_.size == 1) return ok_status();
  for (const Run& run : runs) SOTTO_TRY(average(run));
  return ok_status();
}

Status RoundBuilder::average(const Run& run) {
  if (x_.wire && *x_.wire != run.dtype) return average_as(run, *x_.wire);
  return all_reduce(run.counts, run.dtype, run.first_slot);
}

// In a copy of another type, which is what ranks add up.
Status RoundBuilder::average_as(const Run& run, Dtype wire) {
  std::vector<uint32_t> numbers(run.counts.size());
  std::iota(numbers.begin(), numbers.end(), 0u);
  const FlatLayout layout = FlatLayout::concatenated(run.counts, numbers);
  if (layout.size() == 0) return ok_status();
  const uint64_t element = dtype_bytes(wire);
  const uint32_t copy = b_.scratch(layout.size() * element);
  std::vector<uint64_t> bytes;
  for (const uint64_t count : run.counts) bytes.push_back(count * element);
  const uint32_t parts = b_.bound_list(bytes);
  uint64_t at = 0;
  for (uint32_t i = 0; i < bytes.size(); at += bytes[i++]) b_.alias(parts + i, copy, at);
  const auto convert = [&](uint32_t from, Dtype from_type, uint32_t to, Dtype to_type) {
    const auto bits = [](Dtype type) { return static_cast<uint32_t>(dtype_bytes(type) * 8); };
    b_.kernel<kernels::Convert>({.x = list(from, Access::kRead, bits(from_type)),
                                 .y = list(to, Access::kWrite, bits(to_type))},
                                layout.pieces({0, layout.size()}, 0),
                                ConvertArgs{from_type, to_type, 1});
  };
  convert(run.first_slot, run.dtype, parts, wire);
  SOTTO_TRY(all_reduce({layout.size()}, wire, copy));
  convert(parts, wire, run.first_slot, run.dtype);
  return ok_status();
}

// In place.
Status RoundBuilder::all_reduce(SmallVector<uint64_t> counts, Dtype dtype, uint32_t first_slot) {
  CollectiveRequest request;
  request.kind = OpKind::kAllReduce;
  request.rank = x_.rank;
  request.size = x_.size;
  request.reduce = x_.reduce;
  request.dtypes.assign(counts.size(), dtype);
  request.in_place.assign(counts.size(), 1);
  request.counts = std::move(counts);
  request.segment_bytes = x_.sizes.segment_bytes;
  request.held = x_.sizes.held;
  return emit_collective(b_, request, {first_slot, first_slot});
}

void RoundBuilder::exchange_messages() {
  constexpr uint64_t kBytes = sizeof(RoundMessage);
  const auto size = static_cast<uint64_t>(x_.size);
  out_.told = b_.host(kBytes);
  b_.await({&out_.told, 1});
  out_.messages = 8;
  const uint32_t outcome = b_.scratch(out_.messages + size * kBytes);
  const uint32_t word = b_.scratch(4);
  b_.alias(word, outcome, 0);
  const uint32_t rows = b_.scratch(size * kBytes);
  b_.alias(rows, outcome, out_.messages);
  b_.copy({rows, static_cast<uint64_t>(x_.rank) * kBytes, kBytes}, {out_.told, 0, kBytes});
  emit_message_exchange(b_, x_.rank, x_.size, rows, kBytes, b_.next_round());
  b_.kernel<kernels::Gate>({.messages = whole(rows, Access::kRead, 0, size * kBytes),
                            .word = whole(word, Access::kWrite, 0, 4)},
                           {}, GateArgs{kBytes, static_cast<uint32_t>(x_.size), kSkipNonfinite});
  const uint64_t bytes = out_.messages + size * kBytes;
  b_.set_verdict(b_.host(bytes), word, {outcome, 0, bytes});
}

Result<OverlapPlan> RoundBuilder::build() {
  for (const OverlapBucket& bucket : x_.buckets) SOTTO_TRY(emit_bucket(bucket));
  exchange_messages();
  out_.plan = b_.take();
  return std::move(out_);
}

}  // namespace

Result<OverlapPlan> build_overlap_round(const OverlapShape& shape) {
  return RoundBuilder(shape).build();
}

LogicalPlan build_zeros(std::span<const uint64_t> bytes) {
  PlanBuilder b;
  const uint32_t first = b.bound_list(bytes);
  for (uint32_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != 0) b.fill({first + i, 0, bytes[i]}, 0);
  }
  return b.take();
}

}  // namespace sotto
