// The presets of outer steps: where the settings of a file start. outer_presets.def has the rows.
#pragma once

#include <array>
#include <limits>

#include "core/config/outer.h"

namespace sotto {

// A number that a preset leaves to the file; it is asked for where it acts.
inline constexpr double kToBeGiven = std::numeric_limits<double>::quiet_NaN();

struct OuterPreset {
  std::string_view name;
  OuterPayload payload = OuterPayload::kDelta;
  uint64_t period = 48;  // 0: has to be given
  bool delayed = false;  // delay is the period, else 0
  OuterRuleConfig rule = {};
  OuterPenaltyConfig penalty = {};
  OuterClipConfig clip = {};
  OuterMergeConfig merge = {};
  std::optional<CodecSettings> codec = {};
  uint64_t dense_rounds = 1;
  std::array<std::string_view, 2> required = {};  // further keys that have to be given
};

// A sparse codec with error feedback that decays.
constexpr CodecSettings top_k(double error_decay) {
  CodecSettings codec;
  codec.kind = CodecKind::kTopk;
  codec.chunk_align = kSparseAlign;
  codec.sparse.error_decay = error_decay;
  return codec;
}

inline constexpr OuterPreset kOuterPresets[] = {
#define SOTTO_OUTER_PRESET(name_of_preset, ...) {.name = name_of_preset, __VA_ARGS__},
#include "core/config/outer_presets.def"
};

}  // namespace sotto
