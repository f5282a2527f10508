#include "core/overlap/plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/plan/collectives.h"
#include "core/plan/layout.h"

namespace sotto {
namespace {

// Buckets that have scratch memory of their own at a time.
constexpr size_t kHeldBuckets = 4;
constexpr uint64_t kScratchAlignment = 128;

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

  Status emit_bucket(size_t index);
  Status average(const Run& run);
  Status average_as(const Run& run, Dtype wire);
  Status all_reduce(SmallVector<uint64_t> counts, Dtype dtype, uint32_t first_slot);
  // The bucket's gradients have slots from `first` on.
  Status compress(size_t index, std::span<const Run> runs, uint32_t first);
  void convert(const FlatLayout& layout, uint32_t from, Dtype from_type, uint32_t to,
               Dtype to_type);
  void share_scratch();
  void exchange_messages();
  // The decision: no rank has withdrawn, and no bucket met what is not finite.
  void decide(uint32_t word);
  uint64_t message_bytes(size_t bucket) const {
    return x_.coding->layouts[bucket]->message_bytes();
  }
  static FlatLayout layout_of(const Run& run);

  const OverlapShape& x_;
  PlanBuilder b_;
  OverlapPlan out_;
  std::vector<uint32_t> worker_messages_;  // by bucket; kNoSlot: it has no elements
  std::vector<uint32_t> bucket_slots_;  // by bucket: its first slot; then the end of those of all
};

FlatLayout RoundBuilder::layout_of(const Run& run) {
  std::vector<uint32_t> numbers(run.counts.size());
  std::iota(numbers.begin(), numbers.end(), 0u);
  return FlatLayout::concatenated(run.counts, numbers);
}

Status RoundBuilder::emit_bucket(size_t index) {
  const OverlapBucket& bucket = x_.buckets[index];
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
  if (x_.coding != nullptr) return compress(index, runs, first);
  for (const Run& run : runs) SOTTO_TRY(average(run));
  return ok_status();
}

Status RoundBuilder::average(const Run& run) {
  if (x_.wire && *x_.wire != run.dtype) return average_as(run, *x_.wire);
  return all_reduce(run.counts, run.dtype, run.first_slot);
}

// Of lists with the tensors of a layout.
void RoundBuilder::convert(const FlatLayout& layout, uint32_t from, Dtype from_type, uint32_t to,
                           Dtype to_type) {
  const auto bits = [](Dtype type) { return static_cast<uint32_t>(dtype_bytes(type) * 8); };
  b_.kernel<kernels::Convert>({.x = list(from, Access::kRead, bits(from_type)),
                               .y = list(to, Access::kWrite, bits(to_type))},
                              layout.pieces({0, layout.size()}, 0),
                              ConvertArgs{from_type, to_type, 1});
}

// In a copy of another type, which is what ranks add up.
Status RoundBuilder::average_as(const Run& run, Dtype wire) {
  const FlatLayout layout = layout_of(run);
  if (layout.size() == 0) return ok_status();
  const uint64_t element = dtype_bytes(wire);
  const uint32_t copy = b_.scratch(layout.size() * element);
  std::vector<uint64_t> bytes;
  for (const uint64_t count : run.counts) bytes.push_back(count * element);
  const uint32_t parts = b_.bound_list(bytes);
  uint64_t at = 0;
  for (uint32_t i = 0; i < bytes.size(); at += bytes[i++]) b_.alias(parts + i, copy, at);
  convert(layout, run.first_slot, run.dtype, parts, wire);
  SOTTO_TRY(all_reduce({layout.size()}, wire, copy));
  convert(layout, parts, wire, run.first_slot, run.dtype);
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
  request.levels = x_.levels;
  return emit_collective(b_, request, {first_slot, first_slot});
}

Status RoundBuilder::compress(size_t index, std::span<const Run> runs, uint32_t first) {
  const CompressedLayout& bucket = *x_.coding->layouts[index];
  out_.codecs.emplace_back();
  worker_messages_.push_back(kNoSlot);
  if (bucket.elements() == 0) return ok_status();
  // Float32 gradients are read where they are, and their averages are made there.
  const uint32_t in = add_padded_list(b_, bucket, Dtype::kF32);
  const uint32_t out = add_padded_list(b_, bucket, Dtype::kF32);
  for (const Run& run : runs) {
    const uint32_t begin = run.first_slot - first;
    const FlatLayout layout = layout_of(run);
    const bool own = run.dtype != Dtype::kF32 && layout.size() != 0;
    const uint64_t bytes = layout.size() * sizeof(float);
    const uint32_t from = own ? b_.scratch(bytes) : kNoSlot, to = own ? b_.scratch(bytes) : kNoSlot;
    uint64_t at = 0;
    for (uint32_t i = 0; i < run.counts.size(); at += 4 * run.counts[i++]) {
      b_.alias(in + begin + i, own ? from : run.first_slot + i, own ? at : 0);
      b_.alias(out + begin + i, own ? to : run.first_slot + i, own ? at : 0);
    }
    if (own) convert(layout, run.first_slot, run.dtype, in + begin, Dtype::kF32);
  }
  CompressedMeanRequest r{x_.rank, &bucket, x_.coding->settings, in, out, x_.levels};
  r.segment_bytes = x_.sizes.segment_bytes;
  r.state_copied = true;
  const CompressedMean mean = emit_compressed_mean(b_, r);
  out_.codecs.back() = mean.slots;
  worker_messages_.back() = mean.exchange.worker_messages;
  for (const Run& run : runs) {
    const FlatLayout layout = layout_of(run);
    if (run.dtype == Dtype::kF32 || layout.size() == 0) continue;
    convert(layout, out + (run.first_slot - first), Dtype::kF32, run.first_slot, run.dtype);
  }
  return ok_status();
}

void RoundBuilder::decide(uint32_t word) {
  struct Flags {
    uint32_t slot;
    const CompressedLayout* layout;
    uint32_t fail_word;
  };
  std::vector<Flags> buckets;
  for (size_t b = 0; b < worker_messages_.size(); ++b) {
    if (worker_messages_[b] == kNoSlot) continue;
    const CompressedLayout* const layout = x_.coding->layouts[b];
    buckets.push_back({worker_messages_[b], layout, kSkipNonfinite});
    buckets.push_back({out_.codecs[b].messages, layout, kSkipServer});
  }
  uint32_t prior = buckets.empty() ? word : b_.scratch(4);
  decide_round(b_, out_.end, kNoSlot, prior);
  for (size_t i = 0; i < buckets.size(); ++i) {
    const Flags& f = buckets[i];
    std::vector<uint64_t> sections;
    for (const LayoutSection& s : f.layout->sections()) sections.push_back(s.message_bytes);
    const uint32_t to = i + 1 == buckets.size() ? word : b_.scratch(4);
    b_.kernel<kernels::Gate>(
        {.messages = whole(f.slot, Access::kRead, 0, f.layout->message_bytes()),
         .prior = whole(prior, Access::kRead, 0, 4),
         .word = whole(to, Access::kWrite, 0, 4)},
        {},
        GateArgs{0, f.layout->servers(), f.fail_word,
                 b_.keep_array(std::span<const uint64_t>(sections)), sections.size()});
    prior = to;
  }
}

void RoundBuilder::exchange_messages() {
  const uint64_t order_bytes = x_.observes ? x_.tensors.size() * sizeof(uint32_t) : 0;
  out_.end = emit_round_end(b_, x_.rank, x_.size, x_.levels, order_bytes);
  const uint32_t word = b_.scratch(4);
  decide(word);
  uint64_t bytes = 8;  // the word
  const auto place = [&](uint64_t n) { return std::exchange(bytes, bytes + (n + 7) / 8 * 8); };
  const Region& messages = out_.end.messages;
  out_.messages = place(messages.bytes);
  out_.order_of_rank_0 = place(order_bytes);
  out_.order_bytes = order_bytes;
  for (size_t b = 0; b < worker_messages_.size(); ++b) {
    const uint64_t area = worker_messages_[b] == kNoSlot ? 0 : message_bytes(b);
    out_.verdicts.push_back({place(area), place(area)});
  }
  const uint32_t host = b_.host(bytes);
  b_.set_verdict(host, word);
  b_.copy({host, out_.messages, messages.bytes}, messages);
  if (x_.observes) b_.copy({host, out_.order_of_rank_0, order_bytes}, out_.end.first_order);
  for (size_t b = 0; b < worker_messages_.size(); ++b) {
    if (worker_messages_[b] == kNoSlot) continue;
    const uint64_t area = message_bytes(b);
    b_.copy({host, out_.verdicts[b].workers, area}, {worker_messages_[b], 0, area});
    b_.copy({host, out_.verdicts[b].servers, area}, {out_.codecs[b].messages, 0, area});
  }
}

// What a bucket has received and not yet added up, and copies that it sends, take the place of
// those of an earlier one; lowering orders its steps behind that. So memory does not grow with the
// model. (What codecs leave is looked at when the round is decided.)
void RoundBuilder::share_scratch() {
  std::vector<Slot>& slots = out_.plan.slots;
  const auto first_pool = static_cast<uint32_t>(slots.size());
  const size_t pools = std::min(kHeldBuckets, x_.buckets.size());
  slots.resize(slots.size() + pools, {SlotKind::kScratch, 0, kNoSlot, 0, 0});
  for (size_t b = 0; b < x_.buckets.size(); ++b) {
    const auto pool = static_cast<uint32_t>(first_pool + b % pools);
    uint64_t end = 0;
    for (uint32_t s = bucket_slots_[b]; s < bucket_slots_[b + 1]; ++s) {
      if (slots[s].kind != SlotKind::kScratch || slots[s].alias_of != kNoSlot) continue;
      slots[s].alias_of = pool;
      slots[s].alias_offset = end;
      end += (slots[s].bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
    }
    slots[pool].bytes = std::max(slots[pool].bytes, end);
  }
}

Result<OverlapPlan> RoundBuilder::build() {
  for (size_t b = 0; b < x_.buckets.size(); ++b) {
    bucket_slots_.push_back(b_.scratch(0));
    SOTTO_TRY(emit_bucket(b));
  }
  bucket_slots_.push_back(b_.scratch(0));
  exchange_messages();
  out_.plan = b_.take();
  if (x_.coding == nullptr) share_scratch();
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
