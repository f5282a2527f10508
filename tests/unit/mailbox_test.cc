// The poller of ranks that are threads: waits end by the clock that it is given, or by a wake.
#include "transports/inproc/mailbox.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/support/fake_clock.h"

namespace sotto::inproc {
namespace {

// A poll on a thread of its own.
class Waiting {
 public:
  Waiting(Mailbox& mailbox, int64_t wait_us)
      : thread_([this, &mailbox, wait_us] {
          mailbox.poll(wait_us);
          ended_ = true;
        }) {}
  ~Waiting() { thread_.join(); }
  // Within so much real time.
  bool ends_in(std::chrono::milliseconds limit) const {
    const auto until = std::chrono::steady_clock::now() + limit;
    while (!ended_ && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    return ended_;
  }

 private:
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

constexpr std::chrono::milliseconds kSoon{50}, kLate{5000};

TEST(Mailbox, AWaitEndsWhenItsClockSaysSo) {
  test::FakeClock clock;
  Mailbox one(clock), other(clock);
  const Waiting second(one, 1'000'000), moment(other, 1000);
  EXPECT_FALSE(moment.ends_in(kSoon));
  clock.advance_us(1000);
  EXPECT_TRUE(moment.ends_in(kLate));
  EXPECT_FALSE(second.ends_in(kSoon));
  clock.advance_us(1'000'000);
  EXPECT_TRUE(second.ends_in(kLate));
}

TEST(Mailbox, AWakeEndsAWaitOfAnyLength) {
  const test::FakeClock clock;
  Mailbox mailbox(clock);
  const Waiting waiting(mailbox, INT64_MAX);
  EXPECT_FALSE(waiting.ends_in(kSoon));
  mailbox.wake();
  EXPECT_TRUE(waiting.ends_in(kLate));
}

}  // namespace
}  // namespace sotto::inproc
