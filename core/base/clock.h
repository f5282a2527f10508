// Monotonic time in nanoseconds. Everything that waits or measures takes a Clock, so that tests can
// inject time.
#pragma once

#include <cstdint>

namespace sotto {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t now_ns() const = 0;

  // CLOCK_MONOTONIC; lives as long as the process.
  static const Clock& monotonic();
};

// A point in time by which something has to be done. Default-constructed: never.
class Deadline {
 public:
  Deadline() = default;
  static Deadline in_us(const Clock& clock, int64_t us) {
    Deadline d;
    if (us >= 0) {
      const int64_t now = clock.now_ns();
      d.at_ns_ = us > (INT64_MAX - now) / 1000 ? INT64_MAX : now + us * 1000;
    }
    return d;
  }
  bool never() const { return at_ns_ == INT64_MAX; }
  bool passed(const Clock& clock) const { return !never() && clock.now_ns() >= at_ns_; }
  // Microseconds left, rounded up, at least 0; INT64_MAX when never.
  int64_t left_us(const Clock& clock) const {
    if (never()) return INT64_MAX;
    const int64_t left = at_ns_ - clock.now_ns();
    return left <= 0 ? 0 : (left + 999) / 1000;
  }

 private:
  int64_t at_ns_ = INT64_MAX;
};

}  // namespace sotto
