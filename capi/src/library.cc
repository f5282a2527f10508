// Functions that need no handle: versions, names, error text, log.
#include <atomic>
#include <mutex>
#include <string>

#include "capi/src/guard.h"
#include "capi/src/log_level.h"
#include "core/base/log.h"
#include "core/base/params.h"

namespace sotto::capi {
namespace {

// Set while a call of sotto_set_log has fixed the level.
std::atomic<bool> g_level_is_fixed{false};

// The caller's function, which is called as callbacks are.
struct CallersLog {
  std::mutex mutex;
  sotto_log_fn fn = nullptr;
  void* user = nullptr;
};
CallersLog& callers_log() {
  static CallersLog& log = *new CallersLog;  // used until the process ends
  return log;
}

void call_callers_log(void*, int32_t level, const char* message) {
  sotto_log_fn fn = nullptr;
  void* user = nullptr;
  {
    CallersLog& log = callers_log();
    const std::lock_guard lock(log.mutex);
    fn = log.fn;
    user = log.user;
  }
  const CallbackScope inside;
  if (fn != nullptr) fn(user, level, message);
}

LogLevel level_of(std::string_view word) {
  if (word == "error") return LogLevel::kError;
  if (word == "info") return LogLevel::kInfo;
  if (word == "debug") return LogLevel::kDebug;
  if (word == "trace") return LogLevel::kTrace;
  return LogLevel::kWarn;
}

// SOTTO_LOG alone: a bad value of another variable is no matter of the log.
Result<LogLevel> level_from_environment() {
  const Environment process = process_environment();
  Environment only_log;
  only_log.get = [&process](const std::string& name) {
    return name == "SOTTO_LOG" ? process.get(name) : std::nullopt;
  };
  ParamReader reader(only_log);
  const auto params = reader.read<Params>();
  SOTTO_TRY(reader.status());
  return level_of(params.log);
}

Status set_log_checked(sotto_log_fn fn, void* user, int32_t level) {
  if (level < 0 || level > 5) {
    return invalid_argument("level is {}, allowed 0 (SOTTO_LOG decides) to 5 (trace)", level);
  }
  LogLevel chosen = static_cast<LogLevel>(level);
  if (level == 0) {
    SOTTO_ASSIGN(chosen, level_from_environment());
  }
  g_level_is_fixed.store(level != 0);
  {
    CallersLog& log = callers_log();
    const std::lock_guard lock(log.mutex);
    log.fn = fn;
    log.user = user;
  }
  set_log(fn == nullptr ? nullptr : call_callers_log, nullptr);
  set_log_level(chosen);
  return ok_status();
}

}  // namespace

void apply_log_parameter(std::string_view value) {
  if (!g_level_is_fixed.load()) set_log_level(level_of(value));
}

}  // namespace sotto::capi

using namespace sotto;        // NOLINT: the definitions below are the border itself
using namespace sotto::capi;  // NOLINT

extern "C" {

uint32_t sotto_abi_version(void) { return SOTTO_ABI_VERSION; }

const char* sotto_version_string(void) { return SOTTO_VERSION; }

const char* sotto_status_name(sotto_status status) {
  return code_name(static_cast<Code>(status)).data();  // views of literals: zero-terminated
}

const char* sotto_last_error(void) { return last_error_text(); }

sotto_status sotto_set_log(sotto_log_fn fn, void* user, int32_t level) {
  return guarded("sotto_set_log", [&] { return set_log_checked(fn, user, level); });
}

}  // extern "C"
