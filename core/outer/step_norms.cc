#include "core/outer/step_norms.h"

#include <algorithm>

#include "core/plan/collectives.h"

namespace sotto {

std::span<const NormRange> outer_segment_ranges(PlanBuilder& b, const OuterShape& x) {
  std::vector<NormRange> ranges;
  if (x.segments() > 1) {
    ranges = x.layout->tensor_ranges();
  } else {
    ranges = {{.first_block = 0, .blocks = x.norm_blocks(), .count = x.norm_elements()}};
  }
  const NormRange* kept = b.keep_array(std::span<const NormRange>(ranges));
  return {kept, ranges.size()};
}

uint32_t outer_block_sums(PlanBuilder& b, const OuterShape& x) {
  const uint64_t bytes = std::max<uint64_t>(1, x.layout->tensor_blocks()) * 4;
  const uint32_t sums = b.scratch(bytes);
  // Other shards read them also where this one makes no step.
  if (x.norms_over_shards()) b.fill({sums, 0, bytes}, 0);
  return sums;
}

OperandRef sums_of_whole(PlanBuilder& b, const OuterShape& x, uint32_t sums) {
  const uint64_t own = x.layout->tensor_blocks() * 4, all = x.norm_blocks() * 4;
  if (!x.norms_over_shards() || all == 0) return whole(sums, Access::kRead, 0, own);
  const OuterShards& shards = *x.shards;
  const uint32_t rows = b.scratch(all);
  b.fill({rows, 0, all}, 0);  // blocks that a rank does not have
  const uint64_t row = shards.blocks * 4;
  if (own != 0) b.copy({rows, static_cast<uint64_t>(shards.rank) * row, own}, {sums, 0, own});
  emit_message_exchange(b, shards.rank, shards.size, nullptr, rows, row, b.next_round());
  return whole(rows, Access::kRead, 0, all);
}

// Clips of the whole fragment see all of the new momentum before the anchor moves.
void emit_outer_step(PlanBuilder& b, const OuterShape& x, const std::vector<Piece>& pieces,
                     OuterStepArgs args, const kernels::OuterStepOperands<OperandRef>& o,
                     const OuterUpdateMemory& m, const KernelOptions& options) {
  const bool two = args.clip == OuterClip::kNorm || args.clip == OuterClip::kRms;
  if (two) {
    kernels::OuterStepOperands<OperandRef> first = o;
    const uint32_t m_sums = outer_block_sums(b, x);
    if (!args.params) first.anchor = absent();
    first.x = first.x_launch = absent();
    first.m_sums = blocks(m_sums, Access::kWrite);
    args.pass = OuterPass::kMomentum;
    b.kernel<kernels::OuterStep>(first, pieces, args, options);
    b.kernel<kernels::OuterLimit>(
        {.m_sums = sums_of_whole(b, x, m_sums),
         .numbers = whole(m.numbers, Access::kReadWrite, 0, sizeof(OuterNumbers))},
        {}, OuterLimitArgs{x.norm_blocks(), x.norm_elements(), args.clip});
  }
  const uint32_t step_sums = outer_block_sums(b, x);
  const bool counts = args.clip == OuterClip::kCoordinate || args.clip == OuterClip::kRms;
  const uint32_t clipped = counts ? outer_block_sums(b, x) : kNoSlot;
  kernels::OuterStepOperands<OperandRef> last = o;
  last.step_sums = blocks(step_sums, Access::kWrite);
  if (counts) last.clipped = blocks(clipped, Access::kWrite);
  args.pass = two ? OuterPass::kUpdate : OuterPass::kWhole;
  b.kernel<kernels::OuterStep>(last, pieces, args, options);
  const std::span<const NormRange> ranges = outer_segment_ranges(b, x);
  const OperandRef steps = sums_of_whole(b, x, step_sums);
  b.kernel<kernels::OuterGap>(
      {.step_sums = steps,
       .clipped = counts ? sums_of_whole(b, x, clipped) : absent(),
       .segments = whole(m.segments, Access::kReadWrite, 0, ranges.size() * sizeof(OuterSegment)),
       .factors = whole(m.factors, Access::kReadWrite, 0, ranges.size() * sizeof(OuterFactor))},
      {}, OuterGapArgs{ranges.data(), ranges.size()});
}

void OuterStepAhead::emit(PlanBuilder& b, const OuterShape& x, const std::vector<Piece>& pieces,
                          OuterStepArgs args, kernels::OuterStepOperands<OperandRef> o,
                          const OuterUpdateMemory& m) {
  for (OperandRef* operand : {&o.m, &o.anchor, &o.last_step}) {
    if (operand->slot == kNoSlot) continue;
    const uint64_t bytes = x.layout->flat_elements() * 4;
    const Region array{operand->slot, 0, bytes}, copy{b.scratch(bytes), 0, bytes};
    b.copy(copy, array);
    operand->slot = copy.slot;
    copies_.emplace_back(array, copy);
  }
  o.x = o.x_launch = absent();
  KernelOptions options;
  options.predicate = {m.word, 0, kCommit};
  emit_outer_step(b, x, pieces, args, o, m, options);
}

void OuterStepAhead::publish(PlanBuilder& b, const KernelOptions& options) const {
  for (const auto& [array, copy] : copies_) b.copy(array, copy, options);
}

}  // namespace sotto
