// Periods of outer steps that ranks choose: what is measured, what follows from it, and when
// fragments launch and consume while periods change.
#include <gtest/gtest.h>

#include <random>

#include "core/outer/period_tuner.h"
#include "core/outer/rounds.h"
#include "tests/unit/config_outer.h"

namespace sotto {
namespace {

TEST(OuterPeriod, WhileItIsMeasured) {
  const std::pair<const char*, uint64_t> cases[] = {
      {R"({"period": "auto"})", 4},
      {R"({"period": "auto", "delay": 0})", 4},
      {R"({"period": "auto", "delay": 3})", 4},
      {R"({"period": "auto", "delay": 9})", 10},
      {R"({"period": "auto", "fragments": 2})", 4},
      {R"({"period": "auto", "fragments": 3})", 6},
      {R"({"period": "auto", "fragments": 3, "delay": 6})", 9},
      {R"({"preset": "diloco", "period": "auto", "fragments": 5})", 10},
  };
  for (const auto& [json, period] : cases) EXPECT_EQ(measuring_period(parse(json)), period) << json;
}

TEST(OuterPeriod, HidesAllAverages) {
  const OuterConfig late = parse(R"({"period": "auto"})");
  EXPECT_EQ(automatic_period(late, 11.9, 1), 14u);
  EXPECT_EQ(automatic_period(late, 10, 1), 11u);
  EXPECT_EQ(automatic_period(late, 0, 1), 1u);
  const OuterConfig between = parse(R"({"period": "auto", "delay": 20})");
  EXPECT_EQ(automatic_period(between, 10, 1), 21u);
  EXPECT_EQ(automatic_period(between, 100, 1), 110u);
  const OuterConfig parts = parse(R"({"period": "auto", "fragments": 4})");
  EXPECT_EQ(automatic_period(parts, 10, 1), 12u);
  EXPECT_EQ(automatic_period(parts, 0, 1), 4u);
}

TEST(OuterPeriod, TimesOfAllRanks) {
  std::vector<OuterMessage> messages(3);
  messages[0].network_us = 7, messages[1].network_us = 9000, messages[2].network_us = 8000;
  messages[0].step_us = 100, messages[1].step_us = 300, messages[2].step_us = 500;
  EXPECT_DOUBLE_EQ(measured_times(messages).average, 9e-3);
  EXPECT_DOUBLE_EQ(measured_times(messages).step, 300e-6);
  for (OuterMessage& m : messages) m.step_us = 0;
  EXPECT_DOUBLE_EQ(measured_times(messages).step, 1e-6);
}

// The first launch of fragment 0 from the 20th step on, behind an average of every fragment.
TEST(PeriodTuner, AsksOnce) {
  PeriodTuner tuner;
  EXPECT_FALSE(tuner.asks(100, 0));
  tuner.begin(10);
  EXPECT_FALSE(tuner.asks(29, 0));
  EXPECT_FALSE(tuner.asks(30, 2));
  tuner.consumed();
  EXPECT_FALSE(tuner.asks(30, 2));
  tuner.consumed();
  tuner.answer();
  EXPECT_FALSE(tuner.answered());
  EXPECT_FALSE(tuner.asked());
  EXPECT_TRUE(tuner.asks(30, 2));
  EXPECT_FALSE(tuner.asks(34, 2));
  tuner.answer();
  EXPECT_TRUE(tuner.answered());
  tuner.end();
  EXPECT_FALSE(tuner.measuring() || tuner.asked() || tuner.answered());
  tuner.begin(40, true);
  EXPECT_TRUE(tuner.asks(60, 1));
  tuner.forget();
  EXPECT_TRUE(tuner.asks(64, 1));
}

TEST(PeriodTuner, MeanOfItsOwnSteps) {
  PeriodTuner tuner;
  tuner.inner_step(1, 5);
  tuner.begin(2);
  EXPECT_EQ(tuner.step_ns(), 0);
  tuner.inner_step(2, 1'000'000);  // began before
  tuner.inner_step(3, 10);
  tuner.inner_step(4, 30);
  EXPECT_EQ(tuner.step_ns(), 20);
  tuner.begin(4);
  EXPECT_EQ(tuner.step_ns(), 0);
}

// What every fragment does in a number of steps.
struct Course {
  explicit Course(const OuterRounds& rounds) : launched(rounds.fragments, 0) {}

  // The launch, the consumption and what is counted from them fit in this step.
  void step(const OuterRounds& r, uint64_t n) {
    bool any = false;
    for (uint64_t f = 0; f < r.fragments; ++f) {
      const OuterEvents e = r.at(n, f);
      any = any || e.launches || e.consumes;
      uint64_t& last = launched[f];
      if (e.launches && r.delay == 0) last = n;
      if (e.consumes && last != 0) {
        EXPECT_TRUE(r.follows() || n - last == r.delay) << "fragment " << f << ", step " << n;
        last = 0;
        ++consumed;
      } else if (e.consumes) {
        EXPECT_TRUE(e.launches && r.follows()) << "nothing to consume in step " << n;
      }
      if (e.launches && r.delay != 0) {
        EXPECT_EQ(last, 0u) << "fragment " << f << " is under way in step " << n;
        last = n;
      }
      EXPECT_EQ(r.since_launch(n, f), e.launches ? 0 : r.since_launch(n - 1, f) + 1) << n;
    }
    EXPECT_TRUE(next == 0 || any == (n == next)) << n;
    if (any || next == 0) next = n + r.until_next(n);
  }
  std::vector<uint64_t> launched;
  uint64_t next = 0, consumed = 0;
};

OuterRounds rounds_of(uint64_t period, uint64_t delay, uint64_t fragments, uint64_t synchronous) {
  return {.now = {period, synchronous},
          .delay = delay,
          .fragments = fragments,
          .synchronous = synchronous,
          .past = {}};
}

// However often the period changes, where a fragment's average has been consumed.
TEST(OuterRounds, ChangesOfThePeriodLoseNothing) {
  std::mt19937 random(22);
  const auto below = [&](uint64_t n) {
    return std::uniform_int_distribution<uint64_t>(0, n - 1)(random);
  };
  for (int trial = 0; trial < 300; ++trial) {
    const uint64_t fragments = 1 + below(4);
    const bool follows = below(2) == 0;
    const uint64_t delay = below(7);
    const auto any_period = [&] {
      const uint64_t least = follows ? fragments : std::max(fragments, delay + 1);
      return (least + below(20) + fragments - 1) / fragments * fragments;
    };
    const uint64_t first = any_period();
    OuterRounds r = rounds_of(first, follows ? first : delay, fragments, below(3) * 5);
    SCOPED_TRACE(fmt::format("trial {}: period {}, delay {}, {} fragments", trial, first, r.delay,
                             fragments));
    Course course(r);
    uint64_t waits = 40 + below(40);
    for (uint64_t n = r.synchronous + 1; n < 600; ++n) {
      course.step(r, n);
      const OuterEvents e = r.at(n, 0);
      if (waits != 0) --waits;
      if (waits != 0 || !e.consumes) continue;
      const uint64_t period = any_period();
      r.change_period(n, period);
      EXPECT_EQ(r.delay, follows ? period : delay);
      EXPECT_EQ(r.at(n, 0).consumes, e.consumes);  // the past stays
      course.next = n + r.until_next(n);
      waits = 40 + below(40);
    }
    EXPECT_GT(course.consumed, 10u);
    if (HasFailure()) return;
  }
}

// By trying every step.
uint64_t until_events(const OuterRounds& r, uint64_t step) {
  for (uint64_t n = 1;; ++n) {
    for (uint64_t f = 0; f < r.fragments; ++f) {
      if (!r.at(step + n, f).none()) return n;
    }
  }
}

void expect_until_next(const OuterRounds& r, uint64_t first, uint64_t end) {
  for (uint64_t n = first; n < end && !testing::Test::HasFailure(); ++n) {
    EXPECT_EQ(r.until_next(n), until_events(r, n))
        << fmt::format("step {}: period {} from {}, delay {}, {} fragments, period {} until {}", n,
                       r.now.period, r.now.start, r.delay, r.fragments, r.past.period, r.past_end);
  }
}

TEST(OuterRounds, TheNextStepWithEvents) {
  for (const uint64_t fragments : {1u, 2u, 3u}) {
    for (uint64_t period = fragments; period <= 4 * fragments; period += fragments) {
      for (uint64_t delay = 0; delay <= period; ++delay) {
        for (const uint64_t synchronous : {0u, 1u, 5u}) {
          const OuterRounds r = rounds_of(period, delay, fragments, synchronous);
          const uint64_t begin = synchronous + 2 * period;
          expect_until_next(r, 0, begin + 2 * period);
          for (uint64_t change = begin; change < begin + period; ++change) {
            for (const uint64_t times : {1u, 3u, 7u}) {
              const uint64_t other = times * fragments;
              if (delay != period && other <= delay) continue;
              OuterRounds changed = r;
              changed.change_period(change, other);
              expect_until_next(changed, change, change + 2 * (period + other));
            }
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Found by arithmetic, however long it is.
TEST(OuterRounds, TheNextStepOfALongPeriod) {
  constexpr uint64_t kLong = uint64_t{1} << 53;
  for (const uint64_t delay : {uint64_t{0}, uint64_t{7}, kLong - 1, kLong}) {
    for (const uint64_t fragments : {1u, 2u, 4u}) {
      const OuterRounds r = rounds_of(kLong, delay, fragments, 5);
      SCOPED_TRACE(fmt::format("delay {}, {} fragments", delay, fragments));
      EXPECT_EQ(r.until_next(4), 1u);
      EXPECT_EQ(r.until_next(5), kLong / fragments);
      EXPECT_EQ(r.until_next(kLong / fragments), 5u);
      if (delay == 7) {
        EXPECT_EQ(r.until_next(kLong + 5), 7u);
        EXPECT_EQ(r.until_next(kLong + 12), kLong / fragments - 7);
      }
    }
  }
  EXPECT_EQ(rounds_of(kLong, 0, 4096, 0).until_next(kLong / 4096 * 4095), kLong / 4096);
  OuterRounds r = rounds_of(kLong, kLong, 1, 0);
  r.change_period(kLong, 3);
  EXPECT_EQ(r.until_next(kLong), 3u);
  r.change_period(kLong + 3, kLong);
  EXPECT_EQ(r.until_next(kLong + 3), kLong);
}

}  // namespace
}  // namespace sotto
