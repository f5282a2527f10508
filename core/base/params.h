// The SOTTO_* environment variables (core/base/params.def), read once when a context is created.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace sotto {

// Where variables come from. Tests inject their own; process_environment() is the real one.
struct Environment {
  std::function<std::optional<std::string>(const std::string& name)> get;
  std::function<std::vector<std::string>()> names;  // of all variables that exist
};
Environment process_environment();

// One typed field per line of params.def, named like the variable in lower case without its prefix:
// SOTTO_TIMEOUT_US is timeout_us.
struct Params {
#define SOTTO_PARAM_INT(field, env, fallback, lo, hi, text) int64_t field = fallback;
#define SOTTO_PARAM_DOUBLE(field, env, fallback, lo, hi, text) double field = fallback;
#define SOTTO_PARAM_ENUM(field, env, fallback, allowed, text) std::string field = fallback;
#define SOTTO_PARAM_STRING(field, env, fallback, text) std::string field = fallback;
#define SOTTO_PARAM_BOOL(field, env, fallback, text) bool field = fallback;
#include "core/base/params.def"

  // One line per unknown SOTTO_* name, naming the nearest known one; to be logged by the caller.
  std::vector<std::string> warnings;
  std::vector<std::string> from_env;  // variables that were set, by name

  // INVALID_ARGUMENT names the variable, its value and what is allowed. An empty value counts as
  // unset.
  static Result<Params> read(const Environment& environment);

  // [{"name", "value", "default", "source": "env" | "default", "text"}, ...] in the order of
  // params.def.
  std::string to_json() const;
};

}  // namespace sotto
