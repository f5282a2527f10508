#include "core/config/reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/base/json_text.h"
#include "core/base/text.h"
#include "core/config/optimizer_types.h"

namespace sotto {
namespace {

constexpr size_t kNearMiss = 2;  // edits

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

std::string_view type_text(KeyType type) {
  switch (type) {
    case KeyType::kInt:
    case KeyType::kIntOrAuto: return "a whole number";
    case KeyType::kNumber: return "a number";
    case KeyType::kNumberOrList: return "a number, or a list with one number per parameter group";
    case KeyType::kBool: return "true or false";
    case KeyType::kText: return "a text";
    case KeyType::kBetas: return "a list of two numbers";
    case KeyType::kObject: return "an object";
    case KeyType::kObjectOrBool: return "an object";
    case KeyType::kObjectOrText: return "an object or a text";
    case KeyType::kObjectList: return "a list of objects";
    case KeyType::kFragments: return "a whole number, or a list of lists of tensor indices";
    case KeyType::kAny: return "anything";
  }
  return "?";
}

bool all_of_list(const Json& value, bool (Json::*is)() const noexcept) {
  return value.is_array() &&
         std::all_of(value.begin(), value.end(), [&](const Json& v) { return (v.*is)(); });
}

bool is_whole(const Json& value) {
  return value.is_number() && std::trunc(value.get<double>()) == value.get<double>();
}

bool is_auto(const Json& value) {
  return value.is_string() && word_position("auto", value.get_ref<const std::string&>());
}

bool has_type(const Json& value, KeyType type) {
  switch (type) {
    case KeyType::kInt: return is_whole(value);
    case KeyType::kIntOrAuto: return is_whole(value) || is_auto(value);
    case KeyType::kNumber: return value.is_number();
    case KeyType::kNumberOrList:
      return value.is_number() || (!value.empty() && all_of_list(value, &Json::is_number));
    case KeyType::kBool: return value.is_boolean();
    case KeyType::kText: return value.is_string();
    case KeyType::kBetas: return value.size() == 2 && all_of_list(value, &Json::is_number);
    case KeyType::kObject: return value.is_object();
    case KeyType::kObjectOrBool: return value.is_object() || value.is_boolean();
    case KeyType::kObjectOrText: return value.is_object() || value.is_string();
    case KeyType::kObjectList: return all_of_list(value, &Json::is_object);
    case KeyType::kFragments: return is_whole(value) || all_of_list(value, &Json::is_array);
    case KeyType::kAny: return true;
  }
  return false;
}

bool is_numeric(KeyType type) {
  return type == KeyType::kInt || type == KeyType::kIntOrAuto || type == KeyType::kNumber ||
         type == KeyType::kNumberOrList || type == KeyType::kBetas;
}

// What has to be said of a number, or of one of a list, that is not allowed, perhaps nothing. No
// value: all are allowed.
std::optional<std::string> fault_of(const Json& value, const KeySpec& spec) {
  if (value.is_array()) {
    for (const Json& element : value) {
      if (std::optional<std::string> fault = fault_of(element, spec)) return fault;
    }
    return std::nullopt;
  }
  const auto number = value.get<double>();
  const bool whole = spec.type == KeyType::kInt || spec.type == KeyType::kIntOrAuto;
  if (!spec.range.contains(number) || (whole && std::abs(number) > kMaxInt)) return "";
  const auto rounded = static_cast<float>(number);
  if (whole || (fits_float32(number) && spec.range.contains(rounded))) return std::nullopt;
  return fmt::format(", where {} is {} in float32", number, rounded);
}

// Whether the text is a number in quotes, which deserves its own advice.
bool is_quoted_number(const Json& value) {
  if (!value.is_string()) return false;
  const Json number = Json::parse(value.get_ref<const std::string&>(), nullptr, false);
  return number.is_number();
}

// What a key may hold, for messages.
std::string allowed_text(const KeySpec& spec) {
  if (!spec.words.empty()) return fmt::format("one of {}", spec.words);
  const bool bounded = is_numeric(spec.type) && !std::isinf(spec.range.lo);
  return fmt::format("{}{}{}{}", type_text(spec.type), bounded ? " " : "",
                     bounded ? spec.range.text() : "",
                     spec.type == KeyType::kIntOrAuto ? ", or \"auto\"" : "");
}

// The types that have the key: "OneBitAdam, OneBitLamb"; empty if none has.
std::string kinds_with_key(ConfigSection section, std::string_view key) {
  std::vector<std::string_view> names;
  for (const OptimizerType& type : kOptimizerTypes) {
    if (section == ConfigSection::kOptimizerParams && find_key(section, key, kind_bit(type.kind)))
      names.push_back(type.name);
  }
  for (uint32_t bit = 1; bit < 32; ++bit) {
    if (find_key(section, key, 1u << bit) == nullptr) continue;
    if (section == ConfigSection::kSchedulerParams)
      names.push_back(scheduler_kind_name(static_cast<SchedulerKind>(bit)));
    if (section == ConfigSection::kCodec) names.push_back(codec_name(static_cast<CodecKind>(bit)));
  }
  std::erase(names, "?");
  return word_list(names);
}

// Of a word of three letters two edits leave nothing: "ema" is not "amp".
bool near(std::string_view key, std::string_view candidate) {
  const size_t edits = edit_distance(key, candidate);
  return !candidate.empty() && edits <= kNearMiss && 3 * edits <= candidate.size();
}

}  // namespace

bool Findings::noted(std::string_view path) const {
  return std::ranges::any_of(keys, [&](const KeyNote& note) { return note.path == path; });
}

void Findings::idle(std::string_view path, std::string_view reason) {
  for (KeyNote& note : keys) {
    if (note.path != path) continue;
    note.disposition = disposition_name(Disposition::kIgnored);
    note.reason = reason;
  }
}

Status Findings::fail(std::string_view path, std::string_view text) {
  error_path = path;
  return invalid_argument("{}: {}", path, text);
}

std::string json_text(const Json& value) { return printable(dump_text(value)); }

bool is_active(const Json& value) {
  if (value.is_null() || value == false || (value.is_object() && value.empty())) return false;
  return !value.is_object() || value.value("enabled", Json(true)) != false;
}

std::string placeholder_hint(std::string_view text) {
  for (const std::string_view mark : {"${", "{{", "{%", "<%", "$(", "%("}) {
    if (text.find(mark) == std::string_view::npos) continue;
    return fmt::format("; {} looks like a template's placeholder: fill the template in first",
                       printable(text));
  }
  return "";
}

std::optional<uint32_t> word_position(std::string_view words, std::string_view text) {
  const std::string wanted = lower(text);
  for (uint32_t i = 0; !words.empty(); ++i) {
    const std::string_view word = words.substr(0, words.find('|'));
    if (word == wanted) return i;
    words.remove_prefix(std::min(words.size(), word.size() + 1));
  }
  return std::nullopt;
}

std::string word_list(const std::vector<std::string_view>& words) {
  return fmt::format("{}", fmt::join(words, ", "));
}

Result<ObjectReader> ObjectReader::open(const Json& object, ConfigSection section,
                                        uint32_t kind_bits, std::string path, Findings& findings) {
  ObjectReader reader(object, section, kind_bits, std::move(path));
  for (const auto& [key, value] : object.items()) SOTTO_TRY(reader.check(key, value, findings));
  return reader;
}

Status ObjectReader::check(std::string_view key, const Json& value, Findings& findings) const {
  const KeySpec* spec = find_key(section_, key, kind_bits_);
  if (spec == nullptr) return check_unknown(key, value, findings);
  const std::string path = path_of(key);
  const std::string allowed = allowed_text(*spec);
  if (value.is_null() && spec->nullable) {
    findings.keys.push_back({path, "null", "ignored", "null is the same as leaving the key out"});
    return ok_status();
  }
  const bool takes_auto = spec->type == KeyType::kAny || spec->type == KeyType::kIntOrAuto ||
                          word_position(spec->words, "auto").has_value();
  if (value == "auto" && !takes_auto) {
    return findings.fail(path,
                         fmt::format("found \"auto\", which the training program has to replace "
                                     "before; put {} there",
                                     allowed));
  }
  if (!has_type(value, spec->type)) {
    const bool quoted = is_numeric(spec->type) && is_quoted_number(value);
    const std::string hint = quoted              ? "; write the number without quotes"
                             : value.is_string() ? placeholder_hint(value.get<std::string>())
                                                 : "";
    return findings.fail(path,
                         fmt::format("found {}, allowed is {}{}", json_text(value), allowed, hint));
  }
  if (is_numeric(spec->type) && !value.is_string()) {
    if (const std::optional<std::string> fault = fault_of(value, *spec))
      return findings.fail(
          path, fmt::format("found {}{}, allowed is {}", json_text(value), *fault, allowed));
  }
  if (!spec->words.empty() && !word_position(spec->words, value.get_ref<const std::string&>())) {
    return findings.fail(path, fmt::format("found {}, allowed is {}{}", json_text(value), allowed,
                                           placeholder_hint(value.get<std::string>())));
  }
  const bool has_own_keys = value.is_object() && spec->type != KeyType::kAny;
  if (!has_own_keys && spec->type != KeyType::kObjectList) {
    findings.keys.push_back({path, json_text(value),
                             std::string(disposition_name(spec->disposition)),
                             std::string(spec->reason)});
  }
  if (spec->type == KeyType::kAny && spec->disposition == Disposition::kHost && is_active(value)) {
    findings.warn(path, fmt::format("left to the host framework: {}", spec->reason));
  }
  return ok_status();
}

Status ObjectReader::check_unknown(std::string_view key, const Json& value,
                                   Findings& findings) const {
  const std::vector<std::string_view> known = keys_of(section_, kind_bits_);
  const std::string_view nearest = nearest_word(key, known);
  const std::string shown = printable(key);
  const std::string path = path_of(shown);
  const bool strict = section_ == ConfigSection::kOptimizerParams ||
                      section_ == ConfigSection::kSchedulerParams ||
                      section_ == ConfigSection::kSotto || section_ == ConfigSection::kGroup ||
                      section_ == ConfigSection::kCodec || section_ == ConfigSection::kOuter ||
                      section_ == ConfigSection::kOverlap;
  if (const std::string owners = kinds_with_key(section_, key); strict && !owners.empty()) {
    return findings.fail(path,
                         fmt::format("a key of {}; allowed here are {}", owners, word_list(known)));
  }
  if (strict) {
    return findings.fail(path, fmt::format("unknown key; the nearest one is {}, allowed are {}",
                                           nearest, word_list(known)));
  }
  if (near(key, nearest)) {
    return findings.fail(path, fmt::format("unknown key; is {} meant?", nearest));
  }
  // Everything else of these two belongs to parts that are switched off whenever a file is
  // accepted.
  const bool silent = section_ == ConfigSection::kZero || section_ == ConfigSection::kAmp;
  const std::string_view reason =
      section_ == ConfigSection::kZero  ? "nothing reads it at ZeRO stage 0"
      : section_ == ConfigSection::kAmp ? "no effect while amp.enabled is false"
                                        : "unknown key; it has no effect";
  if (!silent) findings.warn(path, reason);
  findings.keys.push_back(
      {path, json_text(value), silent ? "ignored" : "unknown", std::string(reason)});
  return ok_status();
}

const Json* ObjectReader::find(std::string_view key) const {
  const auto it = object_->find(key);
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

void ObjectReader::get(std::string_view key, double& out) const {
  if (const Json* value = find(key)) out = value->get<double>();
}

void ObjectReader::get(std::string_view key, uint64_t& out) const {
  if (const Json* value = find(key)) out = static_cast<uint64_t>(value->get<double>());
}

void ObjectReader::get(std::string_view key, std::optional<uint64_t>& out) const {
  if (const Json* value = find(key)) out = static_cast<uint64_t>(value->get<double>());
}

void ObjectReader::get(std::string_view key, bool& out) const {
  if (const Json* value = find(key)) out = value->get<bool>();
}

void ObjectReader::get(std::string_view key, std::string& out) const {
  if (const Json* value = find(key)) out = value->get<std::string>();
}

void ObjectReader::get(std::string_view key, std::vector<double>& out) const {
  const Json* value = find(key);
  if (value == nullptr) return;
  if (value->is_number()) {
    out = {value->get<double>()};
  } else {
    out = value->get<std::vector<double>>();
  }
}

std::optional<uint32_t> ObjectReader::word(std::string_view key) const {
  const Json* value = find(key);
  const KeySpec* spec = find_key(section_, key, kind_bits_);
  if (value == nullptr || spec == nullptr) return std::nullopt;
  return word_position(spec->words, value->get_ref<const std::string&>());
}

}  // namespace sotto
