#include "core/outer/average.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "core/config/volume.h"
#include "core/plan/flat_reduce.h"

namespace sotto {

AverageCut cut_of_average(const OuterShape& shape, bool compressed) {
  // 3.4 ms of 10 Gbit/s, where the specification has about 5.
  constexpr uint64_t kSliceBytes = 4 << 20, kMostSlices = 256;
  const auto ranks = static_cast<uint64_t>(shape.size);
  const uint64_t n = shape.layout->elements();
  // The whole payload, of which a rank sends all but its own share in each of two rounds.
  const uint64_t sent = compressed ? compressed_sizes(*shape.config->codec, n, ranks).payload : 0;
  const uint64_t bytes = compressed ? sent / 2 / std::max<uint64_t>(1, ranks - 1) * ranks : 4 * n;
  const uint64_t slices = std::clamp<uint64_t>(bytes / kSliceBytes, 1, kMostSlices);
  if (shape.sizes.segment_bytes != 0) {
    // Windows of byte streams are rounds already.
    return {compressed ? static_cast<uint32_t>(slices) : 1, shape.sizes.segment_bytes};
  }
  if (slices == 1) return {};
  const uint64_t shares = slices * (shape.levels == nullptr ? ranks : shape.levels->shards());
  return {static_cast<uint32_t>(slices), (bytes + shares - 1) / shares};
}

uint32_t add_parts(PlanBuilder& b, const CompressedLayout& layout, uint32_t flat) {
  const uint32_t first = add_padded_list(b, layout, Dtype::kF32);
  for (uint32_t t = 0; t < layout.tensors().size(); ++t) {
    if (layout.tensors()[t].count == 0) continue;
    b.alias(first + t, flat, layout.tensor_pieces(t).front().flat * 4);
  }
  return first;
}

void emit_sum(PlanBuilder& b, const OuterShape& shape, uint32_t from, uint32_t to,
              uint64_t segment_bytes) {
  const uint64_t n = shape.layout->elements();
  if (shape.alone()) {
    b.copy({to, 0, n * 4}, {from, 0, n * 4});
    return;
  }
  const uint64_t counts[] = {n};
  const uint32_t tensors[] = {0};
  const FlatLayout layout = FlatLayout::concatenated(counts, tensors);
  FlatReduceRequest r;
  r.rank = shape.rank;
  r.size = shape.size;
  r.layout = &layout;
  r.op = ReduceOp::kSum;
  r.group = kGroupRanks;
  r.in_list = from;
  r.out_flat = to;
  r.round = b.next_round();
  r.segment_bytes = segment_bytes;
  r.held = shape.sizes.held;
  r.levels = shape.levels;
  emit_flat_all_reduce(b, r);
}

void keep_launch_errors(PlanBuilder& b, const OuterShape& shape, CompressedSlots* slots) {
  if (!serves(shape.levels, shape.rank)) return;
  const auto keep = [&b](uint32_t& error, uint32_t& at_launch, uint64_t bytes) {
    if (error == kNoSlot) error = b.bound(bytes);
    at_launch = b.bound(bytes);
    b.copy({at_launch, 0, bytes}, {error, 0, bytes});
  };
  keep(slots->worker, slots->launch_worker, shape.layout->shard_elements() * 4);
  if (shape.config->codec->row().scales)
    keep(slots->worker_scale, slots->launch_scale, shape.layout->instances() * 4);
}

void emit_without_average(PlanBuilder& b, const OuterShape& shape, const CompressedSlots& slots,
                          uint32_t messages, uint32_t result) {
  // The next average may have been bound before this one ends: it reads the other buffers.
  const auto keep = [&b](uint32_t from, uint32_t to, uint64_t bytes) {
    if (from == kNoSlot) return;
    UndoStep same;
    same.step.work = CopyStep{{from, 0, bytes}, {to, 0, bytes}};
    b.undo(std::move(same));
  };
  keep(slots.server, slots.server_next, shape.layout->chunk_elements() * 4);
  keep(slots.server_scale, slots.server_scale_next, shape.layout->instances() * 4);
  const auto zero = [&b](Region region) {
    UndoStep nothing;
    nothing.step = b.detached_fill(region, 0);
    b.undo(std::move(nothing));
  };
  for (uint64_t r = 0; r < static_cast<uint64_t>(shape.size); ++r)
    zero({messages, r * sizeof(OuterMessage) + offsetof(OuterMessage, weight), 4});
  zero({result, 0, shape.bytes_of(OuterArray::kResult)});
}

}  // namespace sotto
