// Outer steps: what "sotto": {"outer": {...}} describes (specification co2-overlap, sections 3 to
// 7, whose letters stand in brackets).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/codec.h"
#include "core/base/hierarchy.h"
#include "core/base/outer.h"
#include "core/base/status.h"

namespace sotto {

// When a fragment is sent and when its average is used. All numbers are inner steps.
struct OuterSchedule {
  uint64_t period = 48;  // [H] from one launch of a fragment to the next, >= 1
  uint64_t delay = 0;    // [D] from a launch to its consumption, at most period
  // Period "auto": ranks choose it (outer_period.h). Until then period and delay have a guess,
  // with which delay is the period only if it always is.
  bool automatic = false;
  // Steps before outer steps begin; one of the two is 0.
  uint64_t switch_step = 0;
  uint64_t warmup_steps = 0;
  OuterEveryStep every_step = OuterEveryStep::kParameters;

  // Whether delay is the period, whatever that is.
  bool follows() const { return delay == period; }
  OuterSchedule with_period(uint64_t steps) const {
    OuterSchedule s = *this;
    s.period = steps;
    if (follows()) s.delay = steps;
    return s;
  }
  // The last step that averages every_step, as steps before it do; 0: none does.
  uint64_t synchronous_steps() const { return switch_step + warmup_steps; }
  // Whether gradients are ever averaged.
  bool averages_gradients() const {
    return every_step == OuterEveryStep::kGradients && synchronous_steps() > 0;
  }
};

struct OuterRuleConfig {
  OuterRule kind = OuterRule::kHeavyBall;
  // kDelta where the forms coincide: unless OuterConfig::late().
  OuterForm form = OuterForm::kDelta;
  double alpha = 1;      // outer learning rate, > 0
  double beta = 0;       // outer momentum, in [0, 1)
  double freshness = 0;  // [lambda] in [0, 1]
  // Until OuterConfig::resolved, where beta follows the table of co2_paper and freshness is 1/W;
  // they are 0 before.
  bool beta_by_world = false;
  bool freshness_by_world = false;
  bool lr_normalised = false;  // momentum in units of gradients
};

struct OuterPenaltyConfig {
  OuterPenalty kind = OuterPenalty::kNone;
  OuterGranularity granularity = OuterGranularity::kGlobal;
  double lambda_const = 1;         // Lambda of kConst, >= 1
  double lambda_max = 16;          // largest Lambda of a gap, >= 1
  double eps = 1e-12;              // times the root of the elements that share a gap
  bool auto_floor = false;         // OuterConfig::floor() bounds Lambda from below
  bool consensus_scalars = false;  // all ranks use the gap of rank 0
};

struct OuterClipConfig {
  OuterClip kind = OuterClip::kNone;
  OuterClipUnits units = OuterClipUnits::kParam;
  double phi = 0;  // limit; of kRms times the root mean square
};

struct OuterMergeConfig {
  OuterMerge kind = OuterMerge::kReset;
  double a = 0;  // of kLerp and kPull, in [0, 1]
};

// The fragments of a model: lists of indices of tensors, or, while `lists` is empty, `count`
// contiguous runs of tensors (OuterConfig::cut).
struct OuterFragments {
  uint64_t count = 1;  // >= 1
  std::vector<std::vector<uint64_t>> lists;
};
inline constexpr uint64_t kMaxOuterFragments = 4096;

// Valid, defaults of the preset filled in. What a choice makes idle has its neutral value.
struct OuterConfig {
  std::string_view preset;
  OuterPayload payload = OuterPayload::kDelta;
  OuterSchedule schedule;
  OuterRuleConfig rule;
  OuterPenaltyConfig penalty;
  OuterClipConfig clip;
  OuterMergeConfig merge;
  OuterFragments fragments;
  std::optional<CodecSettings> codec;  // of payloads; nothing: float32
  uint64_t dense_rounds = 0;           // first launches of a fragment, without the codec
  OuterNonfinite nonfinite = OuterNonfinite::kSkipRank;
  Hierarchy hierarchy = Hierarchy::kFlat;  // of averages
  std::optional<uint64_t> timeout_ms;      // of calls that name none; nothing: the comm's
  std::vector<std::string> warnings;       // of parse_outer: to be logged once

  // A pseudo-gradient is applied to an anchor that has moved since it was measured: delay = period,
  // where the launch is made before the update (merge reset, lerp).
  bool late() const;
  // Rule none with payload params: the anchor becomes the mean, there is no pseudo-gradient.
  bool averages_parameters() const;
  // Smallest Lambda: 1.25 alpha / (1 - beta) with auto_floor, else 0. After resolved.
  double floor() const;
  // How many times a slow direction gets its pseudo-gradient (section 4.2), before floor and gap;
  // nothing if there is none. After resolved.
  std::optional<double> gain() const;
  // Steps from the launch of a fragment to that of the next one: fragments take turns.
  uint64_t spacing() const;
  // Step of a period in which a fragment is launched, in [0, period).
  uint64_t offset(uint64_t fragment) const;
  // Numbers that depend on the number of ranks filled in. world >= 1.
  OuterConfig resolved(uint64_t world) const;
  // Tensors of each fragment, ascending. elements: of each tensor. INVALID_ARGUMENT if there are
  // fewer tensors than fragments, or the lists name one that is not there or leave one out.
  Result<std::vector<std::vector<uint64_t>>> cut(std::span<const uint64_t> elements) const;
};

// The word of a value in files and reports: outer_word("rule", OuterRule::kNone) is "none".
std::string_view outer_word(std::string_view key, uint8_t number);
template <class Enum>
std::string_view outer_word(std::string_view key, Enum value) {
  return outer_word(key, static_cast<uint8_t>(value));
}

// json: the object itself, or a whole file that has it, either perhaps as one base64url word.
// INVALID_ARGUMENT names line and column, the key, what was found and what is allowed.
Result<OuterConfig> parse_outer(std::string_view json);

// OK if this release can run it, else UNSUPPORTED with every key that stands in the way.
Status check_supported(const OuterConfig& outer);

}  // namespace sotto
