// The plans of an outer optimizer's boundaries, for one fragment (specification co2-overlap,
// sections 3 to 5). A boundary is made of up to four operations:
//
//  - launch, without messages: what this rank averages is taken from its live parameters.
//  - reduction, a collective: averages it, and exchanges what ranks tell each other.
//  - update, without messages: the outer step with the average, and the merge into live parameters.
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
#include "core/config/outer.h"
#include "core/kernels/outer.h"
#include "core/optim/step_plan.h"
#include "core/plan/builder.h"

namespace sotto {

// Memory of a fragment that lives across boundaries.
enum class OuterArray : uint8_t {
  kAnchor,
  kMomentum,
  kPayload,       // what this rank averages
  kPrevious,      // with freshness: kSent of the average which is consumed
  kResult,        // the sum over ranks, or a codec's mean
  kLastStep,      // the anchor's last step, where momentum is not that
  kLaunchAnchor,  // the anchor when the average was launched, where it has moved since
  kLaunchLive,    // live parameters then, where the payload is not that
  kSegments,      // OuterSegment[]
  kInnerSum,      // double: sum of squares of the round's first inner step
  kMessage,       // OuterMessage of this rank
  kMessages,      // OuterMessage of all ranks
  kSwapped,       // live parameters while the anchor is in their place
  kSent,          // with freshness and a codec: what it makes of the payload
  kCount,
};
inline constexpr size_t kOuterArrays = static_cast<size_t>(OuterArray::kCount);

// One space of a fragment's tensors, one after the other.
CompressedLayout outer_layout(const OuterConfig& config, std::vector<LayoutTensor> tensors,
                              uint32_t servers, uint32_t shards = 1);
// Of inner steps before outer steps begin: live parameters become their mean.
OuterConfig outer_mean_of_parameters();

struct OuterShape {
  int32_t rank = 0;
  int32_t size = 1;
  const CompressedLayout* layout = nullptr;  // of the fragment's tensors
  const OuterConfig* config = nullptr;       // resolved
  ModelCopies copies;                        // numbers of tensors of the fragment
  const Levels* levels = nullptr;            // of averages; null: one level
  bool last = false;  // nothing is launched any more: live parameters become the anchor
  MessageSizes sizes = {.segment_bytes = 256 * 1024};

  bool alone() const { return size == 1; }
  // Updates and holds take what is sent with the next average.
  bool launches() const { return config->schedule.follows() && !last; }
  // Before live parameters and anchor move (section 3).
  bool launches_first() const { return config->late() && !last; }
  // An average of parameters is taken from the anchor of now, which has the last step in it.
  bool takes_out_last_step() const;
  // Averages use the codec, behind the first ones. One rank, or one host in two levels, has none.
  bool codes() const {
    return config->codec && (levels == nullptr ? !alone() : levels->host_count() > 1);
  }
  bool keeps_errors() const { return codes() && config->codec->residual; }
  // What this rank has sent is needed of an average and of the next one.
  bool two_payloads() const { return config->rule.freshness > 0; }
  // It is not the payload.
  bool keeps_sent() const { return two_payloads() && codes(); }
  OuterArray sent() const { return keeps_sent() ? OuterArray::kSent : OuterArray::kPayload; }
  // The penalty is made for every element.
  bool by_element() const;
  // Segments of the penalty.
  uint64_t segments() const;
  // Bytes of an array; 0: the fragment has none.
  uint64_t bytes_of(OuterArray array) const;
};

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
