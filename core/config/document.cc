#include "core/config/document.h"

#include <fmt/core.h>

#include <set>

#include "core/base/json_text.h"
#include "core/base/text.h"
#include "core/config/config.h"
#include "core/config/filter.h"
#include "core/config/source.h"

namespace sotto {
namespace {

// Walks through the objects of a text and remembers the first key that one of them has twice; ends
// where they are nested too deep. Not a callback of the parser that makes the values: for every
// object that ends that one looks through all of those before it in the same list.
class DuplicateFinder final : public Json::json_sax_t {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_array(std::size_t) override { return enter(); }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool start_object(std::size_t) override {
    levels_.emplace_back();
    return enter();
  }
  bool end_object() override {
    levels_.pop_back();
    --depth_;
    return true;
  }
  bool key(string_t& key) override {
    add(key);
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const Json::exception&) override {
    return false;
  }
  // Names of the objects around the key and the key itself; empty: no key was there twice.
  const std::string& path() const { return path_; }
  bool too_deep() const { return depth_ > kMaxConfigDepth; }

 private:
  struct Level {
    std::set<std::string> keys;
    std::string current;
  };

  bool enter() {
    ++depth_;
    return !too_deep();
  }
  void add(const std::string& key) {
    levels_.back().current = key;
    if (levels_.back().keys.insert(key).second || !path_.empty()) return;
    for (const Level& level : levels_)
      path_ += fmt::format("{}{}", path_.empty() ? "" : ".", printable(level.current));
  }

  std::vector<Level> levels_;
  int depth_ = 0;  // of objects and lists
  std::string path_;
};

// The parser quotes what it has read last, a number of any length for example. Its end is enough.
std::string without_long_token(std::string_view what) {
  constexpr size_t kKept = 40;
  const size_t open = what.find('\''), close = what.rfind('\'');
  if (open == std::string_view::npos || close <= open + 1 + kKept) return printable(what, 300);
  return fmt::format("{}...{}", printable(what.substr(0, open + 1), 300),
                     printable(what.substr(close - kKept), 300));
}

// The parser's own words, without the class name in front, with line and column in our form.
Status syntax_error(const Json::exception& failure, std::string_view text) {
  std::string_view what = failure.what();
  if (const size_t end = what.find("] "); end != std::string_view::npos)
    what.remove_prefix(end + 2);
  const auto* syntax = dynamic_cast<const Json::parse_error*>(&failure);
  if (syntax == nullptr) return invalid_argument("configuration: {}", without_long_token(what));
  if (const size_t end = what.find(": "); end != std::string_view::npos)
    what.remove_prefix(end + 2);
  const size_t offset = syntax->byte > 0 ? syntax->byte - 1 : 0;
  const SyntaxAdvice advice = explain_syntax(text, offset, what);
  if (!advice.text.empty())
    return invalid_argument("{}: {}", place_of(position_of_offset(text, advice.offset)),
                            advice.text);
  return invalid_argument("{}: {}", place_of(position_of_offset(text, offset)),
                          without_long_token(what));
}

// Replaces the texts "auto" below `json` by the value that `values` has for their path.
void replace_auto(Json& json, const Json& values, const std::string& path) {
  if (json == "auto") {
    if (const auto it = values.find(path); it != values.end()) json = *it;
  } else if (json.is_object()) {
    for (const auto& [key, value] : json.items())
      replace_auto(value, values, path.empty() ? key : fmt::format("{}.{}", path, key));
  } else if (json.is_array()) {
    for (size_t i = 0; i < json.size(); ++i)
      replace_auto(json[i], values, fmt::format("{}[{}]", path, i));
  }
}

Result<Json> read_values(std::string_view text) {
  if (text.empty()) return Json::object();
  std::string twice;
  SOTTO_ASSIGN(const Json values, parse_plain(text, "values", &twice));
  if (!twice.empty())
    return invalid_argument("values: the key {} is there twice; leave one of them out", twice);
  if (!values.is_object()) {
    return invalid_argument(
        "values: found {}, expected a JSON object from paths to values, such as "
        "{{\"optimizer.params.lr\": 0.001}}",
        values.is_discarded() ? "no JSON" : json_text(values));
  }
  for (const auto& [path, value] : values.items()) {
    if (value != "auto" && !value.is_object()) continue;
    return invalid_argument(
        "values: \"{}\" is {}; allowed is a number, a list, true, false, null or another text",
        printable(path), json_text(value));
  }
  return values;
}

Result<std::string> resolve_text(std::string_view text, const Json& values) {
  SOTTO_ASSIGN(const std::string plain, blank_comments(text));
  SOTTO_ASSIGN(Json json, parse_document(plain));
  replace_auto(json, values, "");
  return dump_text(json);
}

}  // namespace

std::string place_of(const TextPosition& position) {
  if (position.line == 0) return "configuration";
  return fmt::format("configuration: line {}, column {}", position.line, position.column);
}

Result<Json> parse_plain(std::string_view text, std::string_view name, std::string* twice) {
  DuplicateFinder duplicates;
  if (Json::sax_parse(text, &duplicates)) *twice = duplicates.path();
  if (duplicates.too_deep())
    return invalid_argument("{}: nested more than {} levels deep", name, kMaxConfigDepth);
  return Json::parse(text, nullptr, false);
}

Result<Json> parse_document(const std::string& text) {
  DuplicateFinder duplicates;
  Json json;
  try {
    json = Json::parse(text);
    Json::sax_parse(text, &duplicates);
  } catch (const Json::exception& failure) {
    return syntax_error(failure, text);
  }
  if (!duplicates.path().empty()) {
    const TextPosition position = position_of_path(text, duplicates.path(), 1);
    return invalid_argument("{}: the key {} is there twice; leave one of them out",
                            place_of(position), duplicates.path());
  }
  if (!json.is_object()) {
    return invalid_argument("configuration: found {}, expected an object {{...}}", json_text(json));
  }
  return json;
}

Result<std::string> config_resolve(std::string_view text, std::string_view values) {
  SOTTO_ASSIGN(const Json found, read_values(values));
  return from_source(text, [&](std::string_view json) { return resolve_text(json, found); });
}

}  // namespace sotto
