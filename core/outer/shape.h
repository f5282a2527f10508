// What a fragment of an outer optimizer has, by its settings.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/codec/compressed_layout.h"
#include "core/config/outer.h"
#include "core/iface/transport.h"
#include "core/optim/step_plan.h"
#include "core/plan/levels.h"

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

// The penalty compares lengths: of the anchor's last step, or of what is averaged.
bool takes_gap(const OuterPenaltyConfig& penalty);

// Of tensors that are shards: the ranks that have those of one replica.
struct OuterShards {
  int32_t rank = 0, size = 1;
  uint64_t blocks = 0;    // norm blocks of the fragment on the rank that has most
  uint64_t elements = 0;  // of the fragment on all of them
};

struct OuterShape {
  int32_t rank = 0;
  int32_t size = 1;
  const CompressedLayout* layout = nullptr;  // of the fragment's tensors
  const OuterConfig* config = nullptr;       // resolved
  ModelCopies copies;                        // numbers of tensors of the fragment
  const Levels* levels = nullptr;            // of averages; null: one level
  std::optional<OuterShards> shards;         // nothing: tensors are whole
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
  // An average under way may have messages that are kept back (Slicing). A state that is made then
  // launches it again, with the error of before the launch.
  bool keeps_launch_errors() const {
    return keeps_errors() && sizes.by_order && config->schedule.delay != 0;
  }
  // What this rank has sent is needed of an average and of the next one.
  bool two_payloads() const { return config->rule.freshness > 0; }
  // It is not the payload.
  bool keeps_sent() const { return two_payloads() && codes(); }
  OuterArray sent() const { return keeps_sent() ? OuterArray::kSent : OuterArray::kPayload; }
  // The penalty is made for every element.
  bool by_element() const;
  // Segments of the penalty.
  uint64_t segments() const;
  // An update takes norms of whole tensors, of which this rank has a shard.
  bool norms_over_shards() const;
  // Of whole tensors, as sums_of_whole() has them: block sums, and the elements they are of.
  uint64_t norm_blocks() const;
  uint64_t norm_elements() const;
  // Bytes of an array; 0: the fragment has none.
  uint64_t bytes_of(OuterArray array) const;
};

}  // namespace sotto
