// Numbers on command lines. CLI11 by itself lets NaN through its ranges, takes -1 for a very large
// count and reads a leading 0 as the mark of an octal number.
#pragma once

#include <CLI/CLI.hpp>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>

namespace sotto_cli {

// What is wrong with a command line, in words of this project where CLI11's are of the counts that
// it asks for.
inline std::string usage_text(const CLI::ParseError& error) {
  std::string text = error.what();
  constexpr std::string_view kTooMany = ": At Most 1 required but received ";
  if (const size_t at = text.find(kTooMany); at != std::string::npos)
    text.replace(at, kTooMany.size(), ": found ").append(" times, allowed is once");
  return text;
}

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

struct Unit {
  std::string_view word;
  double factor;
};
// Smallest first; the words of errors are in this order.
inline constexpr std::array<Unit, 4> kRates = {
    {{"bit", 1e-6}, {"kbit", 1e-3}, {"mbit", 1}, {"gbit", 1e3}}};
inline constexpr std::array<Unit, 4> kTimes = {{{"ns", 1e-6}, {"us", 1e-3}, {"ms", 1}, {"s", 1e3}}};

enum class Least { kZero, kAboveZero };

// "100mbit": a transform to the number in the unit with factor 1.
inline CLI::Validator quantity_in(const std::array<Unit, 4>& units, Least least) {
  std::string words;
  for (const Unit& unit : units) words += (words.empty() ? "" : ", ") + std::string(unit.word);
  const auto check = [=](std::string& text) {
    double value = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, failed] = std::from_chars(text.data(), end, value);
    for (const Unit& unit : units) {
      const double scaled = value * unit.factor;
      if (failed != std::errc() || !std::isfinite(scaled) || scaled < 0 ||
          (scaled == 0 && least == Least::kAboveZero) || std::string_view(stop, end) != unit.word)
        continue;
      char number[32];
      text.assign(number, std::to_chars(number, std::end(number), scaled).ptr);
      return std::string();
    }
    return "found " + text + ", allowed is a number " + (least == Least::kZero ? ">= 0" : "> 0") +
           " and one of " + words + " behind it: 2.5" + std::string(units[2].word);
  };
  return {check, ""};
}

}  // namespace sotto_cli
