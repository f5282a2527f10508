#include "capi/src/guard.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/base/text.h"

namespace sotto::capi {
namespace {

thread_local char t_last_error[kLastErrorBytes];
thread_local uint32_t t_callback_depth = 0;

std::atomic<uint32_t> g_fork_generation{0};

void count_fork() noexcept { g_fork_generation.fetch_add(1, std::memory_order_relaxed); }

// Registered when the first context is made: loading the library alone has no effect on the
// process.
bool register_fork_handler() noexcept { return pthread_atfork(nullptr, nullptr, count_fork) == 0; }

}  // namespace

const char* last_error_text() noexcept { return t_last_error; }

void clear_last_error() noexcept { t_last_error[0] = '\0'; }

void set_last_error(std::string_view function, std::string_view text) noexcept {
  constexpr std::string_view kColon = ": ", kDots = "...";
  char* out = t_last_error;
  size_t room = sizeof t_last_error - 1 - kDots.size();
  for (const std::string_view part : {function, kColon, text}) {
    const size_t n = cut_text(part, room).size();
    std::memcpy(out, part.data(), n);
    out += n;
    room -= n;
    if (n < part.size()) {
      std::memcpy(out, kDots.data(), kDots.size());
      out += kDots.size();
      break;
    }
  }
  *out = '\0';
}

CallbackScope::CallbackScope() noexcept { ++t_callback_depth; }
CallbackScope::~CallbackScope() { --t_callback_depth; }
bool CallbackScope::inside() noexcept { return t_callback_depth != 0; }

Status CallbackScope::refuse_inside() {
  if (!inside()) return ok_status();
  return invalid_state(
      "called from inside a callback of this library, where only sotto_op_error and sotto_op_test "
      "are allowed");
}

uint32_t fork_generation() noexcept {
  static const bool registered = register_fork_handler();
  (void)registered;
  return g_fork_generation.load(std::memory_order_relaxed);
}

Status check_not_forked(uint32_t generation_of_handle) {
  if (generation_of_handle == fork_generation()) return ok_status();
  return invalid_state(
      "the handle was made before fork(); its threads and connections belong to the parent "
      "process, which alone may "
      "use it");
}

}  // namespace sotto::capi
