// Codes with their texts, as values and as exceptions.
#ifndef SOTTO_CPP_STATUS_HPP
#define SOTTO_CPP_STATUS_HPP

#include <string>
#include <type_traits>
#include <utility>

#include "config.hpp"
#if !defined(SOTTO_CPP_NO_EXCEPTIONS)
#include <stdexcept>
#endif

namespace sotto {
inline namespace SOTTO_CPP_ABI {

// A code of sotto.h and, of an error, the library's text.
class status {
 public:
  status() noexcept : code_(SOTTO_OK) {}
  status(sotto_status code, std::string text) : code_(code), text_(std::move(text)) {}

  sotto_status code() const noexcept { return code_; }
  bool ok() const noexcept { return code_ == SOTTO_OK; }
  bool in_progress() const noexcept { return code_ == SOTTO_IN_PROGRESS; }
  // "PEER_LOST", "OK".
  const char* name() const noexcept { return sotto_status_name(code_); }
  // The library's text, "" without an error.
  const std::string& text() const noexcept { return text_; }
  // "PEER_LOST: " and the text.
  std::string message() const { return text_.empty() ? name() : name() + (": " + text_); }

 private:
  sotto_status code_;
  std::string text_;
};

#if !defined(SOTTO_CPP_NO_EXCEPTIONS)

// What functions throw. what() is "PEER_LOST: " and the library's text.
class error : public std::runtime_error {
 public:
  explicit error(const status& s) : std::runtime_error(s.message()), code_(s.code()) {}

  sotto_status code() const noexcept { return code_; }
  // The library's text.
  const char* text() const noexcept {
    const std::size_t name = std::char_traits<char>::length(sotto_status_name(code_));
    return what()[name] == ':' ? what() + name + 2 : "";
  }

 private:
  sotto_status code_;
};

template <class T>
using outcome = T;

namespace detail {

inline void finish(sotto_status code) {
  if (code != SOTTO_OK) throw error(status(code, sotto_last_error()));
}

template <class T>
T finish(sotto_status code, T value) {
  finish(code);
  return value;
}

// A refusal of this interface itself.
template <class T>
T refuse(std::string text) {
  throw error(status(SOTTO_E_INVALID_ARGUMENT, std::move(text)));
}

}  // namespace detail

#else

// A value, or the status that there is none because of. After an error the value is an empty one of
// its type: a handle that every function refuses, an empty text, 0.
template <class T>
class SOTTO_CPP_CHECKED result {
 public:
  explicit result(T value) : value_(std::move(value)) {}
  explicit result(status s) : status_(std::move(s)), value_() {}

  bool ok() const noexcept { return status_.ok(); }
  // result<bool> does not convert: `if (op.test())` asks for its value where exceptions are
  // enabled.
  template <class U = T, class = typename std::enable_if<!std::is_same<U, bool>::value>::type>
  explicit operator bool() const noexcept {
    return ok();
  }
  const status& error() const noexcept { return status_; }
  sotto_status code() const noexcept { return status_.code(); }
  const std::string& text() const noexcept { return status_.text(); }

  T& value() noexcept { return value_; }
  const T& value() const noexcept { return value_; }
  T& operator*() noexcept { return value_; }
  const T& operator*() const noexcept { return value_; }
  T* operator->() noexcept { return &value_; }
  const T* operator->() const noexcept { return &value_; }
  // The value, moved out.
  T take() { return std::move(value_); }

 private:
  status status_;
  T value_;
};

template <>
class SOTTO_CPP_CHECKED result<void> {
 public:
  result() noexcept {}
  explicit result(status s) : status_(std::move(s)) {}

  bool ok() const noexcept { return status_.ok(); }
  explicit operator bool() const noexcept { return ok(); }
  const status& error() const noexcept { return status_; }
  sotto_status code() const noexcept { return status_.code(); }
  const std::string& text() const noexcept { return status_.text(); }

 private:
  status status_;
};

template <class T>
using outcome = result<T>;

namespace detail {

inline result<void> finish(sotto_status code) {
  return code == SOTTO_OK ? result<void>() : result<void>(status(code, sotto_last_error()));
}

template <class T>
result<T> finish(sotto_status code, T value) {
  return code == SOTTO_OK ? result<T>(std::move(value))
                          : result<T>(status(code, sotto_last_error()));
}

template <class T>
result<T> refuse(std::string text) {
  return result<T>(status(SOTTO_E_INVALID_ARGUMENT, std::move(text)));
}

}  // namespace detail

#endif

namespace detail {

// Whether what was waited for has ended; an error if it ended with one.
inline outcome<bool> ended(sotto_status code) {
  return finish(code == SOTTO_IN_PROGRESS ? SOTTO_OK : code, code == SOTTO_OK);
}

// The status that a function tells together with a text of its own.
inline status told(sotto_status code, const char* text) {
  if (code == SOTTO_OK || code == SOTTO_IN_PROGRESS) return status(code, std::string());
  return status(code, text != nullptr && *text != '\0' ? text : sotto_last_error());
}

}  // namespace detail

// Name of a code, "UNKNOWN" of a number that is none.
inline const char* status_name(sotto_status code) noexcept { return sotto_status_name(code); }

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_STATUS_HPP
