#include "core/outer/shape.h"

#include <utility>

namespace sotto {

CompressedLayout outer_layout(const OuterConfig& config, std::vector<LayoutTensor> tensors,
                              uint32_t servers, uint32_t shards) {
  CodecSettings codec = config.codec.value_or(CodecSettings{});
  codec.granularity = Granularity::kFlat;
  return CompressedLayout::of(codec, std::move(tensors), config.codec ? servers : 1,
                              config.codec ? shards : 1);
}

OuterConfig outer_mean_of_parameters() {
  OuterConfig c;
  c.payload = OuterPayload::kParams;
  c.schedule.period = 1;
  c.rule.kind = OuterRule::kNone;
  return c;
}

bool takes_gap(const OuterPenaltyConfig& penalty) {
  return penalty.kind != OuterPenalty::kNone && penalty.kind != OuterPenalty::kConst &&
         penalty.granularity != OuterGranularity::kElement;
}

uint64_t OuterShape::segments() const {
  return config->penalty.granularity == OuterGranularity::kTensor ? layout->tensors().size() : 1;
}

bool OuterShape::takes_out_last_step() const {
  return config->rule.form == OuterForm::kAnchorDiff && config->late() &&
         config->payload == OuterPayload::kDelta;
}

bool OuterShape::by_element() const {
  return config->penalty.kind == OuterPenalty::kGapRel &&
         config->penalty.granularity == OuterGranularity::kElement;
}

bool OuterShape::norms_over_shards() const {
  if (!shards || config->averages_parameters()) return false;
  const bool clips = config->clip.kind == OuterClip::kNorm || config->clip.kind == OuterClip::kRms;
  return clips || takes_gap(config->penalty);
}

uint64_t OuterShape::norm_blocks() const {
  if (!norms_over_shards()) return layout->tensor_blocks();
  return shards->blocks * static_cast<uint64_t>(shards->size);
}

uint64_t OuterShape::norm_elements() const {
  return norms_over_shards() ? shards->elements : layout->elements();
}

uint64_t OuterShape::bytes_of(OuterArray array) const {
  const OuterConfig& c = *config;
  const uint64_t all = layout->flat_elements() * 4;
  const auto of_all = [all](bool there) { return there ? all : 0; };
  switch (array) {
    case OuterArray::kAnchor:
    case OuterArray::kPayload:
    case OuterArray::kSwapped:
    case OuterArray::kResult: return all;
    case OuterArray::kMomentum: return of_all(c.rule.kind != OuterRule::kNone);
    case OuterArray::kPrevious: return of_all(two_payloads());
    case OuterArray::kSent: return of_all(keeps_sent());
    case OuterArray::kLastStep:
      // Momentum is the last step of the rule heavy_ball.
      return of_all(c.rule.kind != OuterRule::kHeavyBall &&
                    (takes_out_last_step() || (by_element() && c.late())));
    case OuterArray::kLaunchAnchor:
      return of_all(c.payload == OuterPayload::kParams && c.rule.form == OuterForm::kDelta &&
                    c.late() && c.rule.kind != OuterRule::kNone);
    case OuterArray::kLaunchLive:
      return of_all(c.merge.kind == OuterMerge::kAddProgress && c.payload == OuterPayload::kDelta);
    case OuterArray::kSegments: return segments() * sizeof(OuterSegment);
    case OuterArray::kInnerSum: return c.penalty.kind == OuterPenalty::kGapInner ? 8 : 0;
    case OuterArray::kMessage: return sizeof(OuterMessage);
    case OuterArray::kMessages: return static_cast<uint64_t>(size) * sizeof(OuterMessage);
    case OuterArray::kCount: break;
  }
  return 0;
}

}  // namespace sotto
