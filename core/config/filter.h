// What DeepSpeed's configuration files contain beyond JSON, taken out before the parser sees it.
#pragma once

#include <string>
#include <string_view>

#include "core/base/status.h"

namespace sotto {

// The deepest nesting of objects and lists that a configuration may have.
inline constexpr int kMaxConfigDepth = 64;

// Replaces comments (#, //, /* */) and the comma before a closing bracket by blanks; strings stay
// as they are. Every other byte keeps its line and column. INVALID_ARGUMENT for a comment that
// never ends and for nesting deeper than kMaxConfigDepth.
Result<std::string> blank_comments(std::string_view text);

struct TextPosition {
  size_t line = 0;  // from 1; 0: not found
  size_t column = 0;
};
TextPosition position_of_offset(std::string_view text, size_t offset);

// Where a value starts in valid JSON. `path` has member names and list indices:
// "sotto.param_groups[0].lr"; names that contain a dot or a bracket are not found. skip: how many
// values of that path to pass over.
TextPosition position_of_path(std::string_view json, std::string_view path, int skip);

}  // namespace sotto
