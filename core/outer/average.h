// The messages of an outer optimizer's averages.
#pragma once

#include <cstdint>

#include "core/codec/compressed_request.h"
#include "core/outer/shape.h"
#include "core/plan/builder.h"

namespace sotto {

// How messages are cut. Links that match by order, which would issue a round as a whole, let slices
// of it go one after the other while inner steps go on (specification co2-overlap, section 11.6):
// an inner collective waits for one of them. What is cut is the same on all ranks.
struct AverageCut {
  uint32_t slices = 1;         // of a round
  uint64_t segment_bytes = 0;  // as in MessageSizes
};
AverageCut cut_of_average(const OuterShape& shape, bool compressed);

// Tensors of the fragment as parts of a flat array, for a codec; the first slot.
uint32_t add_parts(PlanBuilder& builder, const CompressedLayout& layout, uint32_t flat);

// The sum over ranks of one flat array in another one, in full precision.
void emit_sum(PlanBuilder& builder, const OuterShape& shape, uint32_t from, uint32_t to,
              uint64_t segment_bytes);

// Copies the worker's error to where a state that is made beside the average finds it.
void keep_launch_errors(PlanBuilder& builder, const OuterShape& shape, CompressedSlots* slots);
// Of an average that cannot be encoded, in the plan that makes it: what follows finds an average in
// which no rank takes part. messages, result: slots of these arrays.
void emit_without_average(PlanBuilder& builder, const OuterShape& shape,
                          const CompressedSlots& slots, uint32_t messages, uint32_t result);

}  // namespace sotto
