#include "core/config/filter.h"

#include <fmt/core.h>

#include <algorithm>
#include <vector>

namespace sotto {
namespace {

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// Offset behind the string literal that starts at `begin` (a quote), or the end of the text.
size_t skip_string(std::string_view text, size_t begin) {
  size_t i = begin + 1;
  while (i < text.size() && text[i] != '"') i += text[i] == '\\' ? 2 : 1;
  return std::min(i + 1, text.size());
}

// Offset behind the comment that starts at `begin`; `begin` itself if none does; npos if it never
// ends.
size_t skip_comment(std::string_view text, size_t begin) {
  const std::string_view rest = text.substr(begin);
  if (rest.starts_with('#') || rest.starts_with("//")) {
    return std::min(text.find('\n', begin), text.size());
  }
  if (!rest.starts_with("/*")) return begin;
  const size_t end = text.find("*/", begin + 2);
  return end == std::string_view::npos ? end : end + 2;
}

void blank(std::string& text, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    if (text[i] != '\n' && text[i] != '\r') text[i] = ' ';
  }
}

// Walks over valid JSON and compares the path of every value with the wanted one.
class PathFinder {
 public:
  PathFinder(std::string_view text, std::string_view wanted, int skip)
      : text_(text), wanted_(wanted), skip_(skip) {}

  // Offset of the wanted value; npos if there is none.
  size_t run() {
    size_t i = 0;
    while (i < text_.size()) {
      const char c = text_[i];
      if (is_space(c) || c == ':') {
        ++i;
      } else if (c == ',') {
        after_comma();
        ++i;
      } else if (c == '}' || c == ']') {
        if (!levels_.empty()) levels_.pop_back();
        ++i;
      } else if (c == '"' && !levels_.empty() && levels_.back().expects_key) {
        const size_t end = skip_string(text_, i);
        set_key(text_.substr(i + 1, end - i - 2));
        i = end;
      } else {
        if (path() == wanted_ && skip_-- == 0) return i;
        i = enter_value(i);
      }
    }
    return std::string_view::npos;
  }

 private:
  struct Level {
    bool is_object;
    bool expects_key;
    std::string step;  // ".name" or "[index]" of the current member
    size_t index;
  };

  void after_comma() {
    if (levels_.empty()) return;
    Level& level = levels_.back();
    level.expects_key = level.is_object;
    if (!level.is_object) level.step = fmt::format("[{}]", ++level.index);
  }

  void set_key(std::string_view key) {
    Level& level = levels_.back();
    level.step = fmt::format("{}{}", levels_.size() == 1 ? "" : ".", key);
    level.expects_key = false;
  }

  std::string path() const {
    std::string out;
    for (const Level& level : levels_) out += level.step;
    return out;
  }

  // Offset behind the first character of an object or list, or behind a whole plain value.
  size_t enter_value(size_t i) {
    const char c = text_[i];
    if (c == '{') levels_.push_back({true, true, "", 0});
    if (c == '[') levels_.push_back({false, false, "[0]", 0});
    if (c == '{' || c == '[') return i + 1;
    if (c == '"') return skip_string(text_, i);
    while (i < text_.size() && !is_space(text_[i]) && text_[i] != ',' && text_[i] != '}' &&
           text_[i] != ']') {
      ++i;
    }
    return i;
  }

  std::string_view text_;
  std::string_view wanted_;
  int skip_;
  std::vector<Level> levels_;
};

}  // namespace

TextPosition position_of_offset(std::string_view text, size_t offset) {
  const std::string_view before = text.substr(0, std::min(offset, text.size()));
  const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
  return {static_cast<size_t>(std::count(before.begin(), before.end(), '\n')) + 1,
          before.size() - line_start + 1};
}

TextPosition position_of_path(std::string_view json, std::string_view path, int skip) {
  if (path.empty()) return {};
  const size_t offset = PathFinder(json, path, skip).run();
  return offset == std::string_view::npos ? TextPosition{} : position_of_offset(json, offset);
}

Result<std::string> blank_comments(std::string_view text) {
  std::string out(text);
  size_t comma = std::string::npos;  // a comma since which only blanks and comments were seen
  char previous = '[';               // last character that is neither blank nor comment
  int depth = 0;
  size_t i = 0;
  while (i < text.size()) {
    const size_t behind = skip_comment(text, i);
    if (behind == std::string_view::npos) {
      const TextPosition at = position_of_offset(text, i);
      return invalid_argument("configuration: line {}, column {}: the comment /* has no end */",
                              at.line, at.column);
    }
    if (behind != i) {
      blank(out, i, behind);
      i = behind;
      continue;
    }
    const char c = text[i];
    const bool closes = c == '}' || c == ']';
    if (closes && comma != std::string::npos) out[comma] = ' ';
    if (!is_space(c)) {
      const bool after_value = previous != '[' && previous != '{' && previous != ',';
      comma = c == ',' && after_value ? i : std::string::npos;
      previous = c;
    }
    if (c == '{' || c == '[') ++depth;
    if (closes) --depth;
    if (depth > kMaxConfigDepth) {
      const TextPosition at = position_of_offset(text, i);
      return invalid_argument("configuration: line {}, column {}: nested more than {} levels deep",
                              at.line, at.column, kMaxConfigDepth);
    }
    i = c == '"' ? skip_string(text, i) : i + 1;
  }
  return out;
}

}  // namespace sotto
