// A clock that goes on when a test says so.
#pragma once

#include <atomic>

#include "core/base/clock.h"

namespace sotto::test {

class FakeClock final : public Clock {
 public:
  int64_t now_ns() const override { return now_ns_.load(std::memory_order_relaxed); }
  void advance_us(int64_t us) { now_ns_.fetch_add(us * 1000, std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> now_ns_{1'000'000'000};
};

}  // namespace sotto::test
