#include "core/base/log.h"

#include <unistd.h>

#include <atomic>
#include <mutex>
#include <string>

namespace sotto {
namespace {

struct Sink {
  std::mutex mutex;
  LogFn fn = nullptr;
  void* user = nullptr;
};

Sink& sink() {
  static Sink* const s = new Sink;  // never destroyed
  return *s;
}

std::atomic<int32_t> g_level{static_cast<int32_t>(LogLevel::kWarn)};

std::string_view level_name(LogLevel level) {
  switch (level) {
    case LogLevel::kError: return "error";
    case LogLevel::kWarn: return "warning";
    case LogLevel::kInfo: return "info";
    case LogLevel::kDebug: return "debug";
    case LogLevel::kTrace: return "trace";
  }
  return "?";
}

}  // namespace

void set_log(LogFn fn, void* user) {
  std::lock_guard lock(sink().mutex);
  sink().fn = fn;
  sink().user = user;
}

void set_log_level(LogLevel level) {
  g_level.store(static_cast<int32_t>(level), std::memory_order_relaxed);
}

bool log_enabled(LogLevel level) {
  return static_cast<int32_t>(level) <= g_level.load(std::memory_order_relaxed);
}

void log_message(LogLevel level, std::string_view message) {
  LogFn fn = nullptr;
  void* user = nullptr;
  {
    // Released before the call: no lock is held across a callback.
    std::lock_guard lock(sink().mutex);
    fn = sink().fn;
    user = sink().user;
  }
  const std::string text(message);
  if (fn != nullptr) {
    fn(user, static_cast<int32_t>(level), text.c_str());
    return;
  }
  const std::string line = fmt::format("sotto[{}] {}: {}\n", getpid(), level_name(level), text);
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace sotto
