// What may vary per call.
#ifndef SOTTO_CPP_CALL_HPP
#define SOTTO_CPP_CALL_HPP

#include <chrono>
#include <cstdint>

#include "config.hpp"

namespace sotto {
inline namespace SOTTO_CPP_ABI {

enum class reduce_op : sotto_reduce_op {
  standard = SOTTO_REDUCE_DEFAULT,
  sum = SOTTO_REDUCE_SUM,
  mean = SOTTO_REDUCE_MEAN,
  min = SOTTO_REDUCE_MIN,
  max = SOTTO_REDUCE_MAX,
  prod = SOTTO_REDUCE_PROD,
  bit_or = SOTTO_REDUCE_BIT_OR
};

// Durations of any unit turn into these. A negative one is no limit.
using microseconds = std::chrono::microseconds;
inline microseconds no_limit() noexcept { return microseconds(-1); }

class codec;

// The fields of sotto_call, each at its default until it is set:
//   comm.all_reduce(x, sotto::call().reduce(sotto::reduce_op::mean).tag(step))
class call {
 public:
  call() noexcept : c_(initial()) {}

  call& tag(std::uint64_t tag) noexcept {
    c_.tag = tag;
    return *this;
  }
  // A cudaStream_t.
  call& stream(void* stream) noexcept {
    c_.stream = stream;
    return *this;
  }
  call& timeout(microseconds timeout) noexcept {
    c_.timeout_us = timeout.count();
    return *this;
  }
  call& priority(std::int32_t priority) noexcept {
    c_.priority = priority;
    return *this;
  }
  call& background() noexcept { return priority(SOTTO_PRIORITY_BACKGROUND); }
  call& reduce(reduce_op op) noexcept {
    c_.reduce = static_cast<sotto_reduce_op>(op);
    return *this;
  }
  call& encode(const codec& codec) noexcept;
  // An error (BUSY) instead of waiting for a free operation slot.
  call& no_block() noexcept {
    c_.flags |= SOTTO_CALL_NO_BLOCK;
    return *this;
  }
  // `done` must not throw; `user` lives until it has been called.
  call& on_done(sotto_done_fn done, void* user, bool any_thread = false) noexcept {
    c_.on_done = done;
    c_.user = user;
    c_.flags &= ~SOTTO_CALL_DONE_ANY_THREAD;
    if (any_thread) c_.flags |= SOTTO_CALL_DONE_ANY_THREAD;
    return *this;
  }

  const sotto_call* get() const noexcept { return &c_; }

 private:
  static sotto_call initial() noexcept {
    sotto_call c = SOTTO_CALL_INIT;
    return c;
  }

  sotto_call c_;
};

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_CALL_HPP
