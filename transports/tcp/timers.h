// Calls at times of a clock.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/base/clock.h"

namespace sotto::tcp {

class Timers {
 public:
  // Cancels its calls when it is destroyed, which may happen inside one of them.
  using Timer = std::shared_ptr<void>;

  explicit Timers(const Clock& clock) : clock_(clock) {}

  // One call, in `ms` milliseconds.
  [[nodiscard]] Timer after(int64_t ms, std::function<void()> call);
  // A call about every `ms` milliseconds, at least 1: late calls are not made up for.
  [[nodiscard]] Timer every(int64_t ms, std::function<void()> call);
  // No call is due earlier; INT64_MAX: there is none.
  int64_t next_ns() const { return due_.empty() ? INT64_MAX : due_.front().at_ns; }
  // Makes the calls that are due at now_ns, in the order of their times. True if there was one.
  bool run(int64_t now_ns);

 private:
  struct Call {
    int64_t period_ns;  // 0: once
    std::function<void()> call;
  };
  struct Due {
    int64_t at_ns;
    std::weak_ptr<Call> call;  // expired: cancelled
    static bool later(const Due& a, const Due& b) { return a.at_ns > b.at_ns; }
  };
  Timer start(int64_t in_ns, int64_t period_ns, std::function<void()> call);
  void push(Due due);

  const Clock& clock_;
  std::vector<Due> due_;  // a heap, the earliest first
};

}  // namespace sotto::tcp
