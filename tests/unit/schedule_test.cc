#include "core/config/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iterator>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace sotto {
namespace {

using testing::HasSubstr;

constexpr double kTolerance = 1e-11;  // the vectors have nine digits

LrSchedule make(const SchedulerConfig& config, std::vector<double> base = {0.5}) {
  Result<LrSchedule> schedule = LrSchedule::create(config, std::move(base));
  EXPECT_TRUE(schedule.ok()) << schedule.status().text();
  return schedule.take();
}

SchedulerConfig warmup(SchedulerKind kind, WarmupType type) {
  SchedulerConfig config;
  config.kind = kind;
  config.warmup.type = type;
  config.warmup.max_lr = {1e-3};
  config.warmup.num_steps = 10;
  config.warmup.total_num_steps = 20;
  return config;
}

void expect_rates(const LrSchedule& schedule, const std::vector<double>& rates) {
  for (size_t i = 0; i < rates.size(); ++i) {
    EXPECT_NEAR(schedule.lr_of_update(i + 1, 0), rates[i], kTolerance) << "update " << i + 1;
  }
}

TEST(Schedule, WarmupLog) {
  expect_rates(make(warmup(SchedulerKind::kWarmupLR, WarmupType::kLog)),
               {0, 0, 3.01029996e-4, 4.77121255e-4, 6.02059991e-4, 6.98970004e-4, 7.7815125e-4,
                8.4509804e-4, 9.03089987e-4, 9.54242509e-4, 1e-3, 1e-3, 1e-3});
}

TEST(Schedule, WarmupLinear) {
  const LrSchedule schedule = make(warmup(SchedulerKind::kWarmupLR, WarmupType::kLinear));
  expect_rates(schedule, {0, 0, 1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4, 7e-4, 8e-4, 9e-4, 1e-3, 1e-3});
  EXPECT_EQ(schedule.lr_of_update(12, 0), 1e-3);  // exactly
  EXPECT_EQ(schedule.lr_of_update(1000000, 0), 1e-3);
}

TEST(Schedule, WarmupDecayLinear) {
  const LrSchedule schedule = make(warmup(SchedulerKind::kWarmupDecayLR, WarmupType::kLinear));
  expect_rates(schedule, {0,    0,    1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4, 7e-4, 8e-4, 9e-4,
                          1e-3, 9e-4, 8e-4, 7e-4, 6e-4, 5e-4, 4e-4, 3e-4, 2e-4, 1e-4, 0});
  EXPECT_EQ(schedule.lr_of_update(22, 0), 0.0);
  EXPECT_EQ(schedule.lr_of_update(23, 0), 0.0);  // never negative
  EXPECT_EQ(schedule.lr_of_update(UINT32_MAX, 0), 0.0);
}

TEST(Schedule, WarmupDecayLogWarmsUpLikeWarmup) {
  const LrSchedule decay = make(warmup(SchedulerKind::kWarmupDecayLR, WarmupType::kLog));
  const LrSchedule plain = make(warmup(SchedulerKind::kWarmupLR, WarmupType::kLog));
  for (uint64_t k = 1; k <= 11; ++k)
    EXPECT_EQ(decay.lr_of_update(k, 0), plain.lr_of_update(k, 0)) << k;
  EXPECT_NEAR(decay.lr_of_update(13, 0), 9e-4, kTolerance);
}

TEST(Schedule, TotalBelowWarmupFallsToZeroAfterTheWarmup) {
  SchedulerConfig config = warmup(SchedulerKind::kWarmupDecayLR, WarmupType::kLinear);
  config.warmup.total_num_steps = 5;
  const LrSchedule schedule = make(config);
  EXPECT_NEAR(schedule.lr_of_update(11, 0), 9e-4, kTolerance);
  EXPECT_EQ(schedule.lr_of_update(12, 0), 0.0);
}

TEST(Schedule, ShortestWarmupIsTwoSteps) {
  SchedulerConfig config = warmup(SchedulerKind::kWarmupLR, WarmupType::kLog);
  config.warmup.num_steps = 0;
  expect_rates(make(config), {0, 0, 1e-3, 1e-3});  // ln(2)/ln(2) = 1
}

TEST(Schedule, NoSchedulerKeepsTheRateOfEachGroup) {
  const LrSchedule schedule = make(SchedulerConfig(), {0.1, 0.2});
  EXPECT_EQ(schedule.groups(), 2u);
  for (const uint64_t k : {1u, 2u, 1000u}) {
    EXPECT_EQ(schedule.lr_of_update(k, 0), 0.1);
    EXPECT_EQ(schedule.lr_of_update(k, 1), 0.2);
  }
}

TEST(Schedule, ListsGiveEachGroupItsOwnRates) {
  SchedulerConfig config = warmup(SchedulerKind::kWarmupLR, WarmupType::kLinear);
  config.warmup.min_lr = {0.0, 1e-4};
  config.warmup.max_lr = {1e-3, 2e-3};
  const LrSchedule schedule = make(config, {0.5, 0.5});
  EXPECT_EQ(schedule.lr_of_update(1, 0), 0.0);
  EXPECT_EQ(schedule.lr_of_update(1, 1), 1e-4);
  EXPECT_NEAR(schedule.lr_of_update(7, 1), 1e-4 + 19e-4 * 0.5, kTolerance);
  EXPECT_NEAR(schedule.lr_of_update(12, 1), 2e-3, kTolerance);
}

TEST(Schedule, OneValueServesAllGroups) {
  SchedulerConfig config = warmup(SchedulerKind::kWarmupLR, WarmupType::kLinear);
  config.warmup.max_lr = {1e-3, 2e-3, 3e-3};
  const LrSchedule schedule = make(config, {1, 1, 1});
  EXPECT_EQ(schedule.lr_of_update(1, 2), 0.0);
  EXPECT_NEAR(schedule.lr_of_update(12, 2), 3e-3, kTolerance);
}

// Without warmup_max_lr, WarmupLR goes up to the optimizer's rate, that of group 0 for all groups.
TEST(Schedule, WarmupWithoutAPeakEndsAtTheRateOfGroupZero) {
  SchedulerConfig config = warmup(SchedulerKind::kWarmupLR, WarmupType::kLinear);
  config.warmup.max_lr = {};
  const LrSchedule schedule = make(config, {0.5, 0.25});
  for (const uint64_t group : {0u, 1u}) EXPECT_EQ(schedule.lr_of_update(12, group), 0.5);
}

TEST(Schedule, ListOfWrongLengthIsRefused) {
  SchedulerConfig config = warmup(SchedulerKind::kWarmupLR, WarmupType::kLinear);
  config.warmup.max_lr = {1e-3, 2e-3};
  const Result<LrSchedule> schedule = LrSchedule::create(config, {1, 1, 1});
  ASSERT_FALSE(schedule.ok());
  EXPECT_EQ(schedule.status().code(), Code::kInvalidArgument);
  EXPECT_EQ(schedule.status().text(),
            "scheduler.params.warmup_max_lr: 2 values for 3 parameter groups; give one value, or a "
            "list with one per "
            "group");
}

TEST(Schedule, NoGroupsAreRefused) {
  EXPECT_EQ(LrSchedule::create(SchedulerConfig(), {}).status().code(), Code::kInvalidArgument);
}

SchedulerConfig cosine(double cos_min_ratio) {
  SchedulerConfig config = warmup(SchedulerKind::kWarmupCosineLR, WarmupType::kLinear);
  config.warmup.cos_min_ratio = cos_min_ratio;
  return config;
}

TEST(Schedule, WarmupCosine) {
  const LrSchedule schedule = make(cosine(0.1), {1e-3});
  for (const auto& [update, rate] : std::vector<std::pair<uint64_t, double>>{{1, 0},
                                                                             {2, 0},
                                                                             {3, 1e-4},
                                                                             {11, 9e-4},
                                                                             {12, 9.77975432e-4},
                                                                             {13, 9.14057647e-4},
                                                                             {16, 5.5e-4},
                                                                             {21, 1e-4},
                                                                             {22, 1e-4},
                                                                             {31, 1e-4},
                                                                             {1000000, 1e-4}}) {
    EXPECT_NEAR(schedule.lr_of_update(update, 0), rate, 1e-12) << "update " << update;
  }
  EXPECT_EQ(schedule.lr_of_update(22, 0), 1e-3 * 0.1);  // exactly, for ever
}

TEST(Schedule, WarmupCosineCompatRisesAgain) {
  Result<LrSchedule> compat = LrSchedule::create(cosine(0.1), {1e-3, 2e-3}, Mode::kCompat);
  ASSERT_TRUE(compat.ok());
  const LrSchedule strict = make(cosine(0.1), {1e-3, 2e-3});
  for (uint64_t k = 2; k <= 21; ++k) {
    for (const uint64_t g : {0u, 1u})
      EXPECT_EQ(compat->lr_of_update(k, g), strict.lr_of_update(k, g)) << "update " << k;
  }
  EXPECT_NEAR(compat->lr_of_update(22, 0), 1.22024568e-4, 1e-12);
  EXPECT_NEAR(compat->lr_of_update(31, 0), 1e-3, 1e-12);  // the top of the next wave
  // Update 1: the reference zeroes the first group alone.
  EXPECT_EQ(compat->lr_of_update(1, 0), 0.0);
  EXPECT_EQ(compat->lr_of_update(1, 1), 2e-3);
  EXPECT_EQ(strict.lr_of_update(1, 1), 0.0);
}

TEST(Schedule, WarmupCosineUsesEachGroupsOwnRate) {
  SchedulerConfig config = cosine(0.5);
  config.warmup.min_ratio = 0.25;
  const LrSchedule schedule = make(config, {1e-3, 4e-3});
  EXPECT_NEAR(schedule.lr_of_update(2, 0), 0.25e-3, kTolerance);
  EXPECT_NEAR(schedule.lr_of_update(7, 1), 4e-3 * (0.25 + 0.75 * 0.5), kTolerance);
  EXPECT_NEAR(schedule.lr_of_update(16, 1), 4e-3 * 0.75, kTolerance);
}

TEST(Schedule, WarmupCosineLog) {
  SchedulerConfig config = cosine(0.1);
  config.warmup.type = WarmupType::kLog;
  const LrSchedule log = make(config, {1e-3});
  const LrSchedule plain = make(warmup(SchedulerKind::kWarmupLR, WarmupType::kLog));
  for (uint64_t k = 2; k <= 11; ++k)
    EXPECT_NEAR(log.lr_of_update(k, 0), plain.lr_of_update(k, 0), kTolerance) << k;
}

TEST(Schedule, WarmupCosineWithoutRoomForTheCosineEndsAtOnce) {
  for (const uint64_t total : {5u, 10u}) {
    for (const Mode mode : {Mode::kStrict, Mode::kCompat}) {
      SchedulerConfig config = cosine(0.1);
      config.warmup.total_num_steps = total;
      Result<LrSchedule> schedule = LrSchedule::create(config, {1e-3}, mode);
      ASSERT_TRUE(schedule.ok());
      EXPECT_NEAR(schedule->lr_of_update(11, 0), 9e-4, kTolerance);
      for (const uint64_t k : {12u, 13u, 100u}) EXPECT_EQ(schedule->lr_of_update(k, 0), 1e-3 * 0.1);
    }
  }
}

SchedulerConfig one_cycle() {
  SchedulerConfig config;
  config.kind = SchedulerKind::kOneCycle;
  config.cycle.min_lr = 1e-4;
  config.cycle.max_lr = 1e-3;
  config.cycle.first_step_size = config.cycle.second_step_size = 4;
  config.cycle.decay_lr_rate = 0.5;
  config.cycle.decay_step_size = 2;
  return config;
}

TEST(Schedule, OneCycle) {
  const LrSchedule schedule = make(one_cycle());
  expect_rates(schedule, {1e-4, 3.25e-4, 5.5e-4, 7.75e-4, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4,
                          8e-5, 1e-4 / 1.5, 1e-4 / 1.75, 5e-5});
  const double beta1[] = {0.8, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9, 0.9, 0.9};
  for (size_t i = 0; i < std::size(beta1); ++i) {
    const std::optional<Betas> betas = schedule.betas_of_update(i + 1);
    ASSERT_TRUE(betas);
    EXPECT_NEAR(betas->beta1, beta1[i], kTolerance) << "update " << i + 1;
    EXPECT_EQ(betas->beta2, 0.99);
  }
}

TEST(Schedule, OneCycleWithAShorterSecondHalf) {
  SchedulerConfig config = one_cycle();
  config.cycle.second_step_size = 2;
  config.cycle.decay_lr_rate = 0;
  expect_rates(make(config), {1e-4, 3.25e-4, 5.5e-4, 7.75e-4, 1e-3, 5.5e-4, 1e-4, 1e-4, 1e-4});
  config.cycle.decay_lr_rate = 0.5;
  config.cycle.decay_step_size = 0;  // no decay either
  expect_rates(make(config), {1e-4, 3.25e-4, 5.5e-4, 7.75e-4, 1e-3, 5.5e-4, 1e-4, 1e-4, 1e-4});
}

TEST(Schedule, OneCycleMomentumGrowsAfterTheCycleAndStaysBelowOne) {
  SchedulerConfig config = one_cycle();
  config.cycle.decay_mom_rate = 0.05;
  const LrSchedule schedule = make(config);
  EXPECT_NEAR(schedule.betas_of_update(9)->beta1, 0.9, kTolerance);
  EXPECT_NEAR(schedule.betas_of_update(10)->beta1, 0.9 * 1.025, kTolerance);
  EXPECT_NEAR(schedule.betas_of_update(11)->beta1, 0.9 * 1.05, kTolerance);
  EXPECT_EQ(schedule.betas_of_update(1000)->beta1, kLargestGrownBeta1);
  config.cycle.max_mom = 0.9995;
  EXPECT_EQ(make(config).betas_of_update(1000)->beta1, 0.9995);
}

TEST(Schedule, OnlyOneCycleWithMomentumHasBetas) {
  SchedulerConfig config = one_cycle();
  config.cycle.momentum = false;
  EXPECT_FALSE(make(config).betas());
  EXPECT_FALSE(make(SchedulerConfig()).betas());
  EXPECT_FALSE(make(cosine(0.1)).betas());
}

TEST(Schedule, LrRangeTest) {
  SchedulerConfig config;
  config.kind = SchedulerKind::kLRRangeTest;
  config.range_test.step_size = 2;
  expect_rates(make(config), {1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3});
  config.range_test.staircase = true;
  expect_rates(make(config), {1e-3, 1e-3, 2e-3, 2e-3, 3e-3});
  config.range_test.step_rate = 2;
  config.range_test.min_lr = {1e-3, 2e-3};
  const LrSchedule two = make(config, {1, 1});
  EXPECT_NEAR(two.lr_of_update(3, 0), 3e-3, kTolerance);
  EXPECT_NEAR(two.lr_of_update(3, 1), 6e-3, kTolerance);
  const Result<LrSchedule> three = LrSchedule::create(config, {1, 1, 1});
  ASSERT_FALSE(three.ok());
  EXPECT_THAT(three.status().text(), HasSubstr("scheduler.params.lr_range_test_min_lr: 2 values"));
}

TEST(Schedule, RatesAreAlwaysNumbers) {
  constexpr double kHuge = 1e308;
  SchedulerConfig range;
  range.kind = SchedulerKind::kLRRangeTest;
  range.range_test.step_rate = kHuge;
  SchedulerConfig zero = range;
  zero.range_test.min_lr = {0.0};
  SchedulerConfig cycle = one_cycle();
  cycle.cycle.max_lr = cycle.cycle.decay_lr_rate = cycle.cycle.decay_mom_rate = kHuge;
  SchedulerConfig waves = cosine(kHuge);
  for (const SchedulerConfig& config : {range, zero, cycle, waves}) {
    Result<LrSchedule> schedule = LrSchedule::create(config, {kHuge, 0.0}, Mode::kCompat);
    ASSERT_TRUE(schedule.ok());
    for (const uint64_t k : {1u, 2u, 3u, 9u, 10u, 15u, 1000000000u}) {
      for (const uint64_t g : {0u, 1u}) {
        EXPECT_GE(schedule->lr_of_update(k, g), 0.0);
        EXPECT_LE(schedule->lr_of_update(k, g), std::numeric_limits<double>::max());
      }
      if (const auto betas = schedule->betas_of_update(k)) {
        EXPECT_LT(betas->beta1, 1.0);
      }
    }
  }
  EXPECT_EQ(make(zero).lr_of_update(100, 0), 0.0);
}

TEST(Schedule, StateIsTheIterationAlone) {
  SchedulerConfig range;
  range.kind = SchedulerKind::kLRRangeTest;
  for (const SchedulerConfig& config : {warmup(SchedulerKind::kWarmupDecayLR, WarmupType::kLinear),
                                        cosine(0.1), one_cycle(), range}) {
    LrSchedule schedule = make(config);
    EXPECT_EQ(schedule.last_batch_iteration(), -1);
    for (uint64_t k = 1; k <= 30; ++k) {
      EXPECT_EQ(schedule.lr(0), schedule.lr_of_update(k, 0)) << "update " << k;
      LrSchedule resumed = make(config);
      ASSERT_TRUE(resumed.restore(schedule.last_batch_iteration()).ok());
      EXPECT_EQ(resumed.lr(0), schedule.lr(0)) << "update " << k;
      if (const auto betas = schedule.betas()) {
        EXPECT_EQ(resumed.betas()->beta1, betas->beta1) << "update " << k;
      }
      schedule.advance();
      EXPECT_EQ(schedule.last_batch_iteration(), static_cast<int64_t>(k) - 1);
    }
  }
}

TEST(Schedule, RestoreRefusesNegativeIterations) {
  LrSchedule schedule = make(warmup(SchedulerKind::kWarmupLR, WarmupType::kLog));
  EXPECT_TRUE(schedule.restore(-1).ok());
  EXPECT_EQ(schedule.restore(-2).code(), Code::kInvalidArgument);
  EXPECT_EQ(schedule.last_batch_iteration(), -1);
}

}  // namespace
}  // namespace sotto
