#include "core/group/variables.h"

#include <charconv>

#include "core/base/text.h"

namespace sotto {

Result<int64_t> number_of(const std::string& name, const std::string& text, int64_t low,
                          int64_t high) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, failed] = std::from_chars(text.data(), end, value);
  if (failed != std::errc() || stop != end || value < low || value > high) {
    return invalid_argument("environment variable {} is \"{}\"; allowed: a whole number {} to {}",
                            name, printable(text), low, high);
  }
  return value;
}

}  // namespace sotto
