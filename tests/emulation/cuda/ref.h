// A std::shared_ptr whose count orders nothing. Threads that have held the same stream, event or
// record are not ordered by that; to ThreadSanitizer the count of a std::shared_ptr would do so,
// whenever one of them happens to be done with it first.
//
// Threads: as std::shared_ptr.
#pragma once

#include <memory>
#include <utility>

#include "tests/emulation/cuda/sync_model.h"

namespace sotto::fake_cuda {

template <class T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(std::shared_ptr<T> held) : held_(std::move(held)) {}
  Ref(const Ref& other) {
    Quiet quiet;
    held_ = other.held_;
  }
  Ref(Ref&&) noexcept = default;
  Ref& operator=(Ref other) noexcept {
    held_.swap(other.held_);
    return *this;
  }
  ~Ref() {
    if (held_ == nullptr) return;
    Quiet quiet;
    held_.reset();
  }

  T* get() const { return held_.get(); }
  T* operator->() const { return held_.get(); }
  T& operator*() const { return *held_; }
  bool operator==(const Ref&) const = default;
  bool operator==(std::nullptr_t) const { return held_ == nullptr; }

 private:
  std::shared_ptr<T> held_;
};

template <class T, class... A>
Ref<T> make_ref(A&&... arguments) {
  return Ref<T>(std::make_shared<T>(std::forward<A>(arguments)...));
}

}  // namespace sotto::fake_cuda
