#include "core/base/params.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <type_traits>

#include "core/base/text.h"

extern char** environ;

namespace sotto {
namespace {

constexpr std::string_view kPrefix = "SOTTO_";

// Take the value of a variable; a wrong one is refused with what is allowed.
using Refusal = std::optional<std::string>;

Refusal take(const ParamRow::Int& row, const std::string& text) {
  int64_t value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool number = failure == std::errc() && end == text.data() + text.size();
  const int64_t fallback = *row.field;
  if (!number || ((value < row.lo || value > row.hi) && value != fallback)) {
    const std::string range = fmt::format("a whole number from {} to {}", row.lo, row.hi);
    const bool beside = fallback < row.lo || fallback > row.hi;
    return beside ? fmt::format("{} or {}", fallback, range) : range;
  }
  *row.field = value;
  return std::nullopt;
}

Refusal take(const ParamRow::Double& row, const std::string& text) {
  double value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  // The comparison is false for NaN.
  if (failure != std::errc() || end != text.data() + text.size() ||
      !(value >= row.lo && value <= row.hi)) {
    return fmt::format("a number from {} to {}", row.lo, row.hi);
  }
  *row.field = value;
  return std::nullopt;
}

Refusal take(const ParamRow::Enum& row, const std::string& text) {
  for (std::string_view rest = row.allowed; !rest.empty();) {
    const std::string_view word = rest.substr(0, rest.find('|'));
    if (text == word) {
      *row.field = text;
      return std::nullopt;
    }
    rest.remove_prefix(std::min(rest.size(), word.size() + 1));
  }
  return fmt::format("one of {}", row.allowed);
}

Refusal take(const ParamRow::String& row, const std::string& text) {
  const bool plain =
      std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c <= 0x7e; });
  if (!plain) return "printable ASCII text";
  *row.field = text;
  return std::nullopt;
}

Refusal take(const ParamRow::Bool& row, const std::string& text) {
  if (text != "0" && text != "1") return "0 or 1";
  *row.field = text == "1";
  return std::nullopt;
}

// Values and texts are printable ASCII (ParamRow::String), so only these two characters need an
// escape.
std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

std::string json_value(const ParamRow& row) {
  return std::visit(
      [](const auto& value) {
        if constexpr (std::is_same_v<decltype(value.field), std::string*>) {
          return json_text(*value.field);
        } else {
          return fmt::format("{}", *value.field);
        }
      },
      row.value);
}

}  // namespace

Environment process_environment() {
  Environment environment;
  environment.get = [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  };
  environment.names = [] {
    std::vector<std::string> names;
    for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
      const std::string_view text(*entry);
      names.emplace_back(text.substr(0, text.find('=')));
    }
    return names;
  };
  return environment;
}

void ParamReader::read_rows(const std::vector<ParamRow>& rows) {
  for (const ParamRow& row : rows) {
    const std::string fallback = json_value(row);
    const std::string given = environment_.get(row.name).value_or("");
    if (!given.empty()) {
      const Refusal allowed =
          std::visit([&](const auto& value) { return take(value, given); }, row.value);
      if (allowed && status_.ok()) {
        status_ = invalid_argument("environment variable {} is \"{}\", allowed is {}", row.name,
                                   printable(given), *allowed);
      }
    }
    names_.emplace_back(row.name);
    listing_ += fmt::format(R"({}{{"name":{},"value":{},"default":{},"source":"{}","text":{}}})",
                            listing_.empty() ? "" : ",", json_text(row.name), json_value(row),
                            fallback, given.empty() ? "default" : "env", json_text(row.text));
  }
}

std::vector<std::string> ParamReader::warnings() const {
  std::vector<std::string> warnings;
  std::vector<std::string> names = environment_.names();
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    if (!std::string_view(name).starts_with(kPrefix)) continue;
    if (std::find(names_.begin(), names_.end(), name) != names_.end()) continue;
    warnings.push_back(fmt::format(
        "environment variable {} is not known and has no effect; the nearest known one is {}",
        printable(name), nearest_word(name, names_)));
  }
  return warnings;
}

}  // namespace sotto
