// Checked access to one object of the parsed file, driven by the table of keys.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/config.h"
#include "core/config/keys.h"

namespace sotto {

using Json = nlohmann::json;

// What reading a file collects besides values.
struct Findings {
  std::vector<std::string> warnings;
  std::vector<KeyNote> keys;
  std::string error_path;  // path of the value that the error is about; empty: none

  void warn(std::string_view path, std::string_view text) {
    warnings.push_back(fmt::format("{}: {}", path, text));
  }
  // Whether the file has a key with this path that has been read.
  bool noted(std::string_view path) const;
  // The key at `path`, if it is there, has no effect, for this reason.
  void idle(std::string_view path, std::string_view reason);
  // INVALID_ARGUMENT with `path: ` before the text.
  Status fail(std::string_view path, std::string_view text);
};

// The value as one line for messages and reports, cut when long.
std::string json_text(const Json& value);

// Whether a section or switch asks for anything: not null, false, empty or {"enabled": false}.
bool is_active(const Json& value);

// "; ${LR} looks like ..." if the text has a template's placeholder in it, else empty.
std::string placeholder_hint(std::string_view text);

// Position of `text` in "a|b|c" without regard to case.
std::optional<uint32_t> word_position(std::string_view words, std::string_view text);

// A list of words for messages: "a, b, c".
std::string word_list(const std::vector<std::string_view>& words);

// One object whose keys have been checked against the table: known, of the right type, in range.
// Getters leave `out` as it is when the key is absent or null.
class ObjectReader {
 public:
  // Checks every key of `object` and notes it in `findings`. Both must outlive the reader.
  // kind_bits: which rows of a params section count.
  static Result<ObjectReader> open(const Json& object, ConfigSection section, uint32_t kind_bits,
                                   std::string path, Findings& findings);

  bool has(std::string_view key) const { return find(key) != nullptr; }
  std::string path_of(std::string_view key) const {
    return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
  }
  // Null if the key is absent or null.
  const Json* find(std::string_view key) const;

  void get(std::string_view key, double& out) const;
  void get(std::string_view key, uint64_t& out) const;
  void get(std::string_view key, std::optional<uint64_t>& out) const;
  void get(std::string_view key, bool& out) const;
  void get(std::string_view key, std::string& out) const;
  void get(std::string_view key, std::vector<double>& out) const;  // kNumberOrList, kBetas
  // Position of the text among the table's words, from 0; nothing if absent.
  std::optional<uint32_t> word(std::string_view key) const;

 private:
  ObjectReader(const Json& object, ConfigSection section, uint32_t kind_bits, std::string path)
      : object_(&object), section_(section), kind_bits_(kind_bits), path_(std::move(path)) {}
  Status check(std::string_view key, const Json& value, Findings& findings) const;
  Status check_unknown(std::string_view key, const Json& value, Findings& findings) const;

  const Json* object_;
  ConfigSection section_;
  uint32_t kind_bits_;
  std::string path_;
};

}  // namespace sotto
