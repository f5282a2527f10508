#include "core/config/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
  config.warmup_type = type;
  config.warmup_num_steps = 10;
  config.total_num_steps = 20;
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
  config.total_num_steps = 5;
  const LrSchedule schedule = make(config);
  EXPECT_NEAR(schedule.lr_of_update(11, 0), 9e-4, kTolerance);
  EXPECT_EQ(schedule.lr_of_update(12, 0), 0.0);
}

TEST(Schedule, ShortestWarmupIsTwoSteps) {
  SchedulerConfig config = warmup(SchedulerKind::kWarmupLR, WarmupType::kLog);
  config.warmup_num_steps = 0;
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
  config.warmup_min_lr = {0.0, 1e-4};
  config.warmup_max_lr = {1e-3, 2e-3};
  const LrSchedule schedule = make(config, {0.5, 0.5});
  EXPECT_EQ(schedule.lr_of_update(1, 0), 0.0);
  EXPECT_EQ(schedule.lr_of_update(1, 1), 1e-4);
  EXPECT_NEAR(schedule.lr_of_update(7, 1), 1e-4 + 19e-4 * 0.5, kTolerance);
  EXPECT_NEAR(schedule.lr_of_update(12, 1), 2e-3, kTolerance);
}

TEST(Schedule, OneValueServesAllGroups) {
  SchedulerConfig config = warmup(SchedulerKind::kWarmupLR, WarmupType::kLinear);
  config.warmup_max_lr = {1e-3, 2e-3, 3e-3};
  const LrSchedule schedule = make(config, {1, 1, 1});
  EXPECT_EQ(schedule.lr_of_update(1, 2), 0.0);
  EXPECT_NEAR(schedule.lr_of_update(12, 2), 3e-3, kTolerance);
}

TEST(Schedule, ListOfWrongLengthIsRefused) {
  SchedulerConfig config = warmup(SchedulerKind::kWarmupLR, WarmupType::kLinear);
  config.warmup_max_lr = {1e-3, 2e-3};
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

class ScheduleNotBuilt : public testing::TestWithParam<SchedulerKind> {};

TEST_P(ScheduleNotBuilt, IsUnsupportedByName) {
  SchedulerConfig config;
  config.kind = GetParam();
  const Result<LrSchedule> schedule = LrSchedule::create(config, {1});
  ASSERT_FALSE(schedule.ok());
  EXPECT_EQ(schedule.status().code(), Code::kUnsupported);
  EXPECT_THAT(schedule.status().text(), HasSubstr(std::string(scheduler_kind_name(GetParam()))));
}

INSTANTIATE_TEST_SUITE_P(, ScheduleNotBuilt,
                         testing::Values(SchedulerKind::kWarmupCosineLR, SchedulerKind::kOneCycle,
                                         SchedulerKind::kLRRangeTest));

TEST(Schedule, StateIsTheIterationAlone) {
  const SchedulerConfig config = warmup(SchedulerKind::kWarmupDecayLR, WarmupType::kLinear);
  LrSchedule schedule = make(config);
  EXPECT_EQ(schedule.last_batch_iteration(), -1);
  for (uint64_t k = 1; k <= 30; ++k) {
    EXPECT_EQ(schedule.lr(0), schedule.lr_of_update(k, 0)) << "update " << k;
    LrSchedule resumed = make(config);
    ASSERT_TRUE(resumed.restore(schedule.last_batch_iteration()).ok());
    EXPECT_EQ(resumed.lr(0), schedule.lr(0)) << "update " << k;
    schedule.advance();
    EXPECT_EQ(schedule.last_batch_iteration(), static_cast<int64_t>(k) - 1);
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
