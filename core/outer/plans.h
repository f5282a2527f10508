// The plans of an outer optimizer's boundaries, for one fragment (specification co2-overlap,
// sections 3 to 5). A boundary is made of up to four operations:
//
//  - launch, without messages: what this rank averages is taken from its live parameters.
//  - reduction, a collective: averages it, and exchanges what ranks tell each other.
//  - update, without messages: the outer step with the average, and the merge into live parameters.
//    Where it needs norms of tensors of which ranks have shards it begins with messages between
//    these; so does what measures the first inner step.
//  - hold, without messages: the merge with the anchor as it is, where there is no average yet.
//
// Each has its own plan, since another inner step may lie between any two of them. Where delay is
// the period there is no launch: updates and holds take what is sent (OuterShape::launches). It has
// the memory of the average that they consume, which is not overwritten unless the update is made.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/codec/compressed.h"
#include "core/kernels/outer.h"
#include "core/outer/shape.h"
#include "core/plan/builder.h"

namespace sotto {

// What the host finds in the verdict slot of an update: the word of the decision, then these.
// Offsets in bytes.
struct OuterOutcome {
  uint64_t numbers = 0;   // OuterNumbers
  uint64_t factors = 0;   // OuterFactor[segments]
  uint64_t messages = 0;  // OuterMessage[size]
};

struct OuterPlan {
  LogicalPlan plan;
  // Slots that a run binds. Lists have one slot per tensor. kNoSlot: the plan does not use it.
  std::array<uint32_t, kOuterArrays> arrays;
  uint32_t params = kNoSlot;  // list
  uint32_t copies = kNoSlot;  // list
  uint32_t inputs = kNoSlot;  // host, written before the start: OuterInputs
  uint32_t told = kNoSlot;    // host, written before the start: OuterMessage
  CompressedSlots codec;
  OuterOutcome outcome;
  bool over_shards = false;  // its messages are for the ranks with the other shards of the replica
};

// Of shapes whose updates do not.
OuterPlan build_outer_launch(const OuterShape& shape);
// compressed: with the settings' codec.
OuterPlan build_outer_reduction(const OuterShape& shape, bool compressed);
// compressed: the average comes from a codec. next: what is launched goes to one; of shapes that
// keep what is sent.
OuterPlan build_outer_update(const OuterShape& shape, bool compressed, bool next = false);
OuterPlan build_outer_hold(const OuterShape& shape, bool next = false);
// Measures the round's first inner step.
OuterPlan build_outer_inner_sum(const OuterShape& shape);
// Ranks whose anchors and momenta differ take the mean of them, and anchors as live parameters.
OuterPlan build_outer_agreement(const OuterShape& shape);
// The anchor takes the place of live parameters; back: they have theirs again.
OuterPlan build_outer_swap(const OuterShape& shape, bool back);
// Live parameters become the anchor.
OuterPlan build_outer_start(const OuterShape& shape);

}  // namespace sotto
