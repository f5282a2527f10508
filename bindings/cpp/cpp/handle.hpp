// What all handles have in common, and how texts and states are read.
#ifndef SOTTO_CPP_HANDLE_HPP
#define SOTTO_CPP_HANDLE_HPP

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "span.hpp"
#include "status.hpp"

namespace sotto {
inline namespace SOTTO_CPP_ABI {

// Owns one handle of the C interface, or none.
template <class C, sotto_status (*Destroy)(C*)>
class handle {
 public:
  handle() noexcept : c_(nullptr) {}
  // Takes the ownership of a handle of the C interface.
  explicit handle(C* c) noexcept : c_(c) {}
  handle(handle&& other) noexcept : c_(other.release()) {}
  handle& operator=(handle&& other) noexcept {
    if (this != &other) {
      destroy();
      c_ = other.release();
    }
    return *this;
  }
  handle(const handle&) = delete;
  handle& operator=(const handle&) = delete;
  ~handle() { destroy(); }

  explicit operator bool() const noexcept { return c_ != nullptr; }
  // For calls of the C interface; stays owned.
  C* get() const noexcept { return c_; }
  // Gives the ownership away.
  C* release() noexcept {
    C* const c = c_;
    c_ = nullptr;
    return c;
  }
  // Destroys the handle as the destructor does, and says what the library met. It is gone in any
  // case but INVALID_STATE. Nothing happens without one.
  outcome<void> close() {
    C* const c = release();
    const sotto_status code = Destroy(c);
    if (code == SOTTO_E_INVALID_STATE) c_ = c;
    return detail::finish(code);
  }

 private:
  void destroy() noexcept {
    if (c_ != nullptr) Destroy(c_);
  }

  C* c_;
};

namespace detail {

// What read(data, capacity, &length) writes, which may have grown since it was measured.
template <class Out, class Read>
outcome<Out> read_all(Out out, std::uint64_t terminator, Read read) {
  std::uint64_t length = 0;
  sotto_status code = read(nullptr, 0, &length);
  while (code == SOTTO_OK && length + terminator > out.size()) {
    out.resize(length + terminator);
    code = read(&out[0], out.size(), &length);
  }
  if (code == SOTTO_OK) out.resize(length);
  return finish(code, std::move(out));
}

template <class Read>
outcome<std::string> read_text(Read read) {
  return read_all(std::string(), 1, read);
}

template <class Read>
outcome<std::vector<std::uint8_t>> read_bytes(Read read) {
  return read_all(std::vector<std::uint8_t>(), 0, read);
}

}  // namespace detail

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_HANDLE_HPP
