#include "core/base/params.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <type_traits>

#include "core/base/text.h"
#include "core/base/transports.h"

extern char** environ;

namespace sotto {
namespace {

constexpr std::string_view kPrefix = "SOTTO_";

constexpr std::string_view kNames[] = {
#define SOTTO_PARAM_INT(field, env, fallback, lo, hi, text) env,
#define SOTTO_PARAM_DOUBLE(field, env, fallback, lo, hi, text) env,
#define SOTTO_PARAM_ENUM(field, env, fallback, allowed, text) env,
#define SOTTO_PARAM_STRING(field, env, fallback, text) env,
#define SOTTO_PARAM_BOOL(field, env, fallback, text) env,
#include "core/base/params.def"
};

// Reads one variable after another and keeps the first error.
class Reader {
 public:
  Reader(const Environment& environment, Params& params)
      : environment_(environment), params_(params) {}
  const Status& status() const { return status_; }

  void read_int(int64_t& field, const char* name, int64_t lo, int64_t hi) {
    const auto text = value_of(name);
    if (!text) return;
    int64_t value = 0;
    const auto [end, failure] = std::from_chars(text->data(), text->data() + text->size(), value);
    const bool number = failure == std::errc() && end == text->data() + text->size();
    if (!number || ((value < lo || value > hi) && value != field)) {
      const std::string range = fmt::format("a whole number from {} to {}", lo, hi);
      return fail(name, *text,
                  field < lo || field > hi ? fmt::format("{} or {}", field, range) : range);
    }
    field = value;
  }

  void read_double(double& field, const char* name, double lo, double hi) {
    const auto text = value_of(name);
    if (!text) return;
    double value = 0;
    const auto [end, failure] = std::from_chars(text->data(), text->data() + text->size(), value);
    // The comparison is false for NaN.
    if (failure != std::errc() || end != text->data() + text->size() ||
        !(value >= lo && value <= hi)) {
      return fail(name, *text, fmt::format("a number from {} to {}", lo, hi));
    }
    field = value;
  }

  void read_enum(std::string& field, const char* name, std::string_view allowed) {
    const auto text = value_of(name);
    if (!text) return;
    for (std::string_view rest = allowed; !rest.empty();) {
      const std::string_view word = rest.substr(0, rest.find('|'));
      if (*text == word) {
        field = *text;
        return;
      }
      rest.remove_prefix(std::min(rest.size(), word.size() + 1));
    }
    fail(name, *text, fmt::format("one of {}", allowed));
  }

  void read_string(std::string& field, const char* name) {
    const auto text = value_of(name);
    if (!text) return;
    const bool plain =
        std::all_of(text->begin(), text->end(), [](char c) { return c >= 0x20 && c <= 0x7e; });
    if (!plain) return fail(name, *text, "printable ASCII text");
    field = *text;
  }

  void read_bool(bool& field, const char* name) {
    const auto text = value_of(name);
    if (!text) return;
    if (*text != "0" && *text != "1") return fail(name, *text, "0 or 1");
    field = *text == "1";
  }

 private:
  std::optional<std::string> value_of(const char* name) {
    auto value = environment_.get(name);
    if (!value || value->empty()) return std::nullopt;
    params_.from_env.emplace_back(name);
    return value;
  }

  void fail(const char* name, const std::string& value, const std::string& allowed) {
    if (!status_.ok()) return;
    status_ = invalid_argument("environment variable {} is \"{}\", allowed is {}", name,
                               printable(value), allowed);
  }

  const Environment& environment_;
  Params& params_;
  Status status_;
};

void warn_of_unknown_names(const Environment& environment, std::vector<std::string>& warnings) {
  std::vector<std::string> names = environment.names();
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    if (!std::string_view(name).starts_with(kPrefix)) continue;
    if (std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames)) continue;
    warnings.push_back(fmt::format(
        "environment variable {} is not known and has no effect; the nearest known one is {}",
        printable(name), nearest_word(name, kNames)));
  }
}

// Values and texts are printable ASCII (read_string), so only these two characters need an escape.
std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

template <class T>
std::string json_value(const T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    return json_text(value);
  } else {
    return fmt::format("{}", value);
  }
}

class Listing {
 public:
  explicit Listing(const std::vector<std::string>& from_env) : from_env_(from_env) {}
  template <class T>
  void add(const char* name, const T& value, const T& fallback, const char* text) {
    const bool env = std::find(from_env_.begin(), from_env_.end(), name) != from_env_.end();
    out_ += fmt::format(R"({}{{"name":{},"value":{},"default":{},"source":"{}","text":{}}})",
                        out_.empty() ? "" : ",", json_text(name), json_value(value),
                        json_value(fallback), env ? "env" : "default", json_text(text));
  }
  std::string take() { return "[" + out_ + "]"; }

 private:
  const std::vector<std::string>& from_env_;
  std::string out_;
};

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

Result<Params> Params::read(const Environment& environment) {
  Params params;
  Reader reader(environment, params);
#define SOTTO_PARAM_INT(field, env, fallback, lo, hi, text) \
  reader.read_int(params.field, env, lo, hi);
#define SOTTO_PARAM_DOUBLE(field, env, fallback, lo, hi, text) \
  reader.read_double(params.field, env, lo, hi);
#define SOTTO_PARAM_ENUM(field, env, fallback, allowed, text) \
  reader.read_enum(params.field, env, allowed);
#define SOTTO_PARAM_STRING(field, env, fallback, text) reader.read_string(params.field, env);
#define SOTTO_PARAM_BOOL(field, env, fallback, text) reader.read_bool(params.field, env);
#include "core/base/params.def"
  SOTTO_TRY(reader.status());
  warn_of_unknown_names(environment, params.warnings);
  return params;
}

std::string Params::to_json() const {
  const Params defaults;
  Listing listing(from_env);
#define SOTTO_PARAM_INT(field, env, fallback, lo, hi, text) \
  listing.add(env, field, defaults.field, text);
#define SOTTO_PARAM_DOUBLE(field, env, fallback, lo, hi, text) \
  listing.add(env, field, defaults.field, text);
#define SOTTO_PARAM_ENUM(field, env, fallback, allowed, text) \
  listing.add(env, field, defaults.field, text);
#define SOTTO_PARAM_STRING(field, env, fallback, text) \
  listing.add(env, field, defaults.field, text);
#define SOTTO_PARAM_BOOL(field, env, fallback, text) listing.add(env, field, defaults.field, text);
#include "core/base/params.def"
  return listing.take();
}

}  // namespace sotto
