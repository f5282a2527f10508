// Status and Result<T>: how expected failures travel inside the library.
//
// Codes are the ones of the C ABI (sotto.h, sotto_status) and say what the caller can do next.
// Texts name rank, peer, operation, key or argument, what was found and what is allowed. Exceptions
// are for programming errors and allocation failure only; they end at the C ABI (capi/src/guard.h)
// and at every thread's entry function.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace sotto {

enum class Code : int32_t {
  kOk = 0,
  kInProgress = 1,
  kInvalidArgument = -1,
  kInvalidState = -2,
  kUnsupported = -3,
  kOutOfMemory = -4,
  kBusy = -5,
  kTimeout = -6,
  kPeerLost = -7,
  kAborted = -8,
  kProtocol = -9,
  kTransport = -10,
  kDevice = -11,
  kInternal = -12,
  kNonfinite = -13,
  kCancelled = -14,
};

// The word of the C header for a code, without prefix: "OK", "PEER_LOST". "UNKNOWN" for any other
// number.
std::string_view code_name(Code code);

// A code and, unless it is kOk, a text. Copies share the text. An OK status allocates nothing.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string text);

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& text() const;

  // The same code with `prefix: ` before the text; an OK status stays as it is.
  Status with_prefix(std::string_view prefix) const;

 private:
  Code code_ = Code::kOk;
  std::shared_ptr<const std::string> text_;
};

inline Status ok_status() { return {}; }

template <class... Args>
Status error(Code code, fmt::format_string<Args...> text, Args&&... args) {
  return Status(code, fmt::format(text, std::forward<Args>(args)...));
}
template <class... Args>
Status invalid_argument(fmt::format_string<Args...> text, Args&&... args) {
  return Status(Code::kInvalidArgument, fmt::format(text, std::forward<Args>(args)...));
}
template <class... Args>
Status invalid_state(fmt::format_string<Args...> text, Args&&... args) {
  return Status(Code::kInvalidState, fmt::format(text, std::forward<Args>(args)...));
}
template <class... Args>
Status unsupported(fmt::format_string<Args...> text, Args&&... args) {
  return Status(Code::kUnsupported, fmt::format(text, std::forward<Args>(args)...));
}

// Either a value or a status that is not OK.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit on purpose
  Result(Status status) : status_(std::move(status)) {}  // NOLINT: implicit on purpose

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  T take() { return std::move(*value_); }

 private:
  std::optional<T> value_;
  Status status_;
};

// The status of the exception that is being handled: OUT_OF_MEMORY or INTERNAL.
Status status_of_exception();

// f(), which returns a Result; an exception becomes its status. For work of one rank that others
// have to hear of.
template <class F>
auto caught(F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (...) {
    return status_of_exception();
  }
}

}  // namespace sotto

// Returns the status of `expr` from the enclosing function unless it is OK.
#define SOTTO_TRY(expr)                                    \
  do {                                                     \
    ::sotto::Status sotto_try_status_ = (expr);            \
    if (!sotto_try_status_.ok()) return sotto_try_status_; \
  } while (false)

#define SOTTO_CONCAT_INNER(a, b) a##b
#define SOTTO_CONCAT(a, b) SOTTO_CONCAT_INNER(a, b)

// SOTTO_ASSIGN(auto x, f()): x is the value of the Result f() returns, or its status leaves the
// function.
#define SOTTO_ASSIGN(declaration, expr) \
  SOTTO_ASSIGN_INNER(SOTTO_CONCAT(sotto_result_, __LINE__), declaration, expr)
#define SOTTO_ASSIGN_INNER(name, declaration, expr) \
  auto name = (expr);                               \
  if (!name.ok()) return name.status();             \
  declaration = name.take()
