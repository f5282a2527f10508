// Numbers on command lines. CLI11 by itself lets NaN through its ranges, takes -1 for a very large
// count and reads a leading 0 as the mark of an octal number.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <type_traits>

namespace sotto_cli {

inline constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// Takes the texts that std::from_chars takes as a whole. A transform of an option, not a check:
// whole numbers lose their leading zeros.
template <class Number>
CLI::Validator number_in(const char* kind, const std::string& range, Number low, Number high) {
  const auto check = [=](std::string& text) {
    Number value{};
    const char* const end = text.data() + text.size();
    const auto [stop, failed] = std::from_chars(text.data(), end, value);
    // The comparison is false for NaN.
    if (failed != std::errc() || stop != end || !(value >= low && value <= high))
      return "found " + text + ", allowed is a " + kind + " " + range;
    if constexpr (std::is_integral_v<Number>) text = std::to_string(value);
    return std::string();
  };
  return {check, range};
}

inline CLI::Validator number_from(double low, double high) {
  std::ostringstream range;
  range << "from " << low << " to " << high;
  return number_in("number", range.str(), low, high);
}

// high kNoLimit: none is told.
inline CLI::Validator whole_number_from(int64_t low, int64_t high = kNoLimit) {
  const std::string range = high == kNoLimit
                                ? ">= " + std::to_string(low)
                                : "from " + std::to_string(low) + " to " + std::to_string(high);
  return number_in("whole number", range, low, high);
}

}  // namespace sotto_cli
