// The table of all keys: type, what is allowed, and what becomes of them here.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/config.h"

namespace sotto {

// The objects of a file that have keys of their own in the table.
enum class ConfigSection {
  kTop,
  kOptimizer,
  kOptimizerParams,
  kScheduler,
  kSchedulerParams,
  kFp16,
  kBf16,
  kAmp,
  kDataTypes,
  kZero,
  kSotto,
  kGroup,
  kCodec,
  kOuter,
  kOverlap,
};

// 2^53: every whole number up to here is a double.
inline constexpr double kMaxInt = 9007199254740992.0;

enum class KeyType {
  kInt,           // also 5e8: a float without a fraction, at most 2^53
  kIntOrAuto,     // the text "auto" too
  kNumber,        // finite
  kNumberOrList,  // a number, or a list with one per parameter group
  kBool,
  kText,
  kBetas,  // [beta1, beta2], each in [0, 1)
  kObject,
  kObjectOrBool,
  kObjectOrText,
  kObjectList,
  kFragments,  // their number, or a list of lists; what is in these is not looked at
  kAny,        // not looked at
};

enum class Disposition {
  kActs,     // changes what this library does
  kChecked,  // compared with other keys, otherwise left to the training program
  kHost,     // left to the host framework
  kIgnored,  // no effect, for the reason given
};
std::string_view disposition_name(Disposition disposition);

struct NumberRange {
  double lo;
  double hi;  // infinity: no upper bound
  bool lo_open = false;
  bool hi_open = false;

  bool contains(double value) const;
  std::string text() const;  // ">= 0", "in [0, 1)"
};

struct KeySpec {
  ConfigSection section;
  std::string_view key;
  uint32_t kinds;  // params sections and codecs: one bit per OptimizerKind, SchedulerKind or
                   // CodecKind that has the key
  KeyType type;
  bool nullable;           // null counts as absent
  NumberRange range;       // numbers
  std::string_view words;  // texts: "a|b|c" in the order of the enum; empty: any
  Disposition disposition;
  std::string_view reason;  // shown in reports
};

std::span<const KeySpec> key_table();

// Null if the section (for this kind) has no such key. kind_bits as in KeySpec::kinds; ~0u: any.
const KeySpec* find_key(ConfigSection section, std::string_view key, uint32_t kind_bits);
std::vector<std::string_view> keys_of(ConfigSection section, uint32_t kind_bits);

constexpr uint32_t kind_bit(OptimizerKind kind) { return 1u << static_cast<uint32_t>(kind); }
constexpr uint32_t kind_bit(CodecKind kind) { return 1u << static_cast<uint32_t>(kind); }
constexpr uint32_t kind_bit(SchedulerKind kind) { return 1u << static_cast<uint32_t>(kind); }

}  // namespace sotto
