// The norms of a boundary, and the outer step that makes and takes them. Where a fragment's tensors
// are shards, norms are of the whole tensors: ranks that have the shards of one replica exchange
// block sums, which are added shard by shard.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/kernels/outer.h"
#include "core/outer/shape.h"
#include "core/plan/builder.h"

namespace sotto {

// Slots of what an update decides by, and tells the host.
struct OuterUpdateMemory {
  uint32_t word = kNoSlot, numbers = kNoSlot, factors = kNoSlot, segments = kNoSlot;
};

// Norm blocks and elements of every segment of the penalty. The plan keeps them.
std::span<const NormRange> outer_segment_ranges(PlanBuilder& b, const OuterShape& x);
// Block sums of the fragment's tensors.
uint32_t outer_block_sums(PlanBuilder& b, const OuterShape& x);
// Block sums of the whole tensors, norm_blocks() of them. shards: takes a round of messages.
OperandRef sums_of_whole(PlanBuilder& b, const OuterShape& x, uint32_t sums);

// The step of the anchor, with what clips and the next gap need of it. args: of any pass.
void emit_outer_step(PlanBuilder& b, const OuterShape& x, const std::vector<Piece>& pieces,
                     OuterStepArgs args, const kernels::OuterStepOperands<OperandRef>& o,
                     const OuterUpdateMemory& m, const KernelOptions& options);

// An outer step in copies of the arrays that it changes, so that its messages come before the
// decision. Live parameters stay as they are.
class OuterStepAhead {
 public:
  // o: the arrays lie in bound slots, `bytes` long.
  void emit(PlanBuilder& b, const OuterShape& x, const std::vector<Piece>& pieces,
            OuterStepArgs args, kernels::OuterStepOperands<OperandRef> o,
            const OuterUpdateMemory& m);
  // The arrays become the copies.
  void publish(PlanBuilder& b, const KernelOptions& options) const;

 private:
  std::vector<std::pair<Region, Region>> copies_;  // array, copy
};

}  // namespace sotto
