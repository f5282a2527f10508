// One log sink per process (sotto_set_log); default: standard error at WARN and above. Silence on
// success.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <string_view>
#include <utility>

namespace sotto {

enum class LogLevel : int32_t { kError = 1, kWarn = 2, kInfo = 3, kDebug = 4, kTrace = 5 };

using LogFn = void (*)(void* user, int32_t level, const char* message);

// fn null: standard error. May be called from any thread; a call in progress finishes with the old
// sink.
void set_log(LogFn fn, void* user);
// Messages above this level are dropped. Set from SOTTO_LOG when a context is created.
void set_log_level(LogLevel level);
bool log_enabled(LogLevel level);
void log_message(LogLevel level, std::string_view message);

template <class... Args>
void log(LogLevel level, fmt::format_string<Args...> text, Args&&... args) {
  if (log_enabled(level)) log_message(level, fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace sotto
