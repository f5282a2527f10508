// The border between C++ and C: every exported function that returns a sotto_status runs its body
// in guarded(), which clears this thread's error text, turns a Status into its code and text, and
// lets no exception out.
#pragma once

#include <exception>
#include <new>
#include <string_view>
#include <utility>

#include "core/base/status.h"
#include "sotto/sotto.h"

namespace sotto::capi {

// Text of this thread's last failed call (sotto_last_error). A fixed array: writing it cannot fail
// and ending a thread runs no destructor. Longer texts are cut at a character border and end with
// "...".
inline constexpr size_t kLastErrorBytes = 4096;
const char* last_error_text() noexcept;
void clear_last_error() noexcept;
void set_last_error(std::string_view function, std::string_view text) noexcept;

// Counts the callbacks of the caller that this thread is inside of.
class CallbackScope {
 public:
  CallbackScope() noexcept;
  ~CallbackScope();
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;
  // INVALID_STATE inside a callback: for functions tagged "not from callbacks".
  static Status refuse_inside();
  static bool inside() noexcept;
};

// How often this process is a forked child of one that had loaded the library; handles remember the
// number of their making and are refused when it differs, since threads and sockets stay with the
// parent.
uint32_t fork_generation() noexcept;
Status check_not_forked(uint32_t generation_of_handle);

template <class Body>
sotto_status guarded(const char* function, Body&& body) noexcept {
  clear_last_error();
  try {
    const Status status = std::forward<Body>(body)();
    if (static_cast<int32_t>(status.code()) < 0) {
      set_last_error(function, status.text());
    } else {
      clear_last_error();  // of calls inside callbacks
    }
    return static_cast<sotto_status>(status.code());
  } catch (const std::bad_alloc&) {
    set_last_error(function, "out of memory");
    return SOTTO_E_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    set_last_error(function, e.what());
    return SOTTO_E_INTERNAL;
  } catch (...) {
    set_last_error(function, "exception of unknown type");
    return SOTTO_E_INTERNAL;
  }
}

}  // namespace sotto::capi
