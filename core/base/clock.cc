#include "core/base/clock.h"

#include <time.h>

namespace sotto {
namespace {

class MonotonicClock final : public Clock {
 public:
  int64_t now_ns() const override {
    timespec ts{};
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return int64_t{ts.tv_sec} * 1'000'000'000 + ts.tv_nsec;
  }
};

}  // namespace

const Clock& Clock::monotonic() {
  static const MonotonicClock* const clock = new MonotonicClock;  // never destroyed
  return *clock;
}

}  // namespace sotto
