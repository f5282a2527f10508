// Drives one backend alone: what the engine's context does, for tests below the engine.
#pragma once

#include <algorithm>

#include "core/iface/rendezvous.h"

namespace sotto::test {

class PollDriver final : public Driver {
 public:
  explicit PollDriver(Poller& poller, const Clock& clock = Clock::monotonic())
      : poller_(poller), clock_(clock) {}
  bool run_until(const std::function<bool()>& done, Deadline deadline) override {
    while (!done()) {
      if (deadline.passed(clock_)) return done();
      poller_.poll(std::min<int64_t>(deadline.left_us(clock_), kSliceUs));
    }
    return true;
  }
  const Clock& clock() const override { return clock_; }

 private:
  static constexpr int64_t kSliceUs = 10'000;  // an upper limit only: work wakes the poller
  Poller& poller_;
  const Clock& clock_;
};

}  // namespace sotto::test
