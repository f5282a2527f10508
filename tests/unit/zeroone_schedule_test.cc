// When 0/1 Adam updates its variance, compresses, stays silent and synchronises.
#include "core/optim/algorithms/zeroone_schedule.h"

#include <gtest/gtest.h>

#include <string>

namespace sotto {
namespace {

IntervalParams params(uint64_t freeze, uint64_t kappa, uint64_t scaler, uint64_t clipper) {
  IntervalParams p;
  p.var_freeze_step = freeze;
  p.var_update_scaler = kappa;
  p.local_step_scaler = scaler;
  p.local_step_clipper = clipper;
  return p;
}

// v: variance, 1: compressed gradient, -: local, s: synchronisation.
std::string events(const IntervalParams& p, uint64_t updates, uint64_t offset = 1) {
  ZeroOneSchedule schedule(p);
  std::string out;
  for (uint64_t t = 1 + offset; t <= updates + offset; ++t) {
    out += "v1-s"[static_cast<size_t>(schedule.kind(t, true))];
    schedule.advance(t);
  }
  return out;
}

TEST(ZeroOneSchedule, EventsOfTheSpecification) {
  EXPECT_EQ(events(params(6, 2, 3, 4), 15), "vvv1v1sss-s---s");  // 13.6
}

TEST(ZeroOneSchedule, BertLargeExample) {
  // Specification 6.5: 152 511 steps, var_freeze_step 12 500.
  const std::string all = events(params(12'500, 16, 32'678, 16), 152'511);
  const auto count = [&](char kind) { return std::count(all.begin(), all.end(), kind); };
  EXPECT_EQ(count('v'), 153);
  EXPECT_EQ(count('1') + count('s'), 74'200);
  EXPECT_EQ(count('-'), 78'158);
}

TEST(ZeroOneSchedule, FreezesAfterVarFreezeStepUpdates) {
  ZeroOneSchedule schedule(params(5, 100, 1, 1));
  for (uint64_t t = 2; t <= 5; ++t) EXPECT_FALSE(schedule.advance(t));
  EXPECT_TRUE(schedule.advance(6));
  EXPECT_TRUE(schedule.counters().frozen);
  EXPECT_FALSE(schedule.advance(7));
}

TEST(ZeroOneSchedule, NoSynchronisationWhereNothingMoved) {
  ZeroOneSchedule schedule(params(1, 1, 10, 4));
  schedule.advance(2);
  EXPECT_EQ(schedule.kind(3, false), ZeroOneUpdate::kLocal);
  EXPECT_EQ(schedule.kind(3, true), ZeroOneUpdate::kSync);
}

TEST(ZeroOneSchedule, RestoresWhatItWas) {
  const IntervalParams p = params(40, 3, 7, 6);
  ZeroOneSchedule one(p);
  for (uint64_t t = 2; t < 100; ++t) {
    ZeroOneSchedule other(p);
    ASSERT_TRUE(other.restore(one.counters(), t - 2, t - 1).ok());
    ASSERT_EQ(other.kind(t, true), one.kind(t, true));
    ASSERT_EQ(other.counters(), one.counters());
    one.advance(t);
  }
}

TEST(ZeroOneSchedule, RefusesCountersOfNoSchedule) {
  ZeroOneSchedule schedule(params(40, 3, 7, 6));
  EXPECT_FALSE(schedule.restore({3, 0, 1, 0, false}, 50, 51).ok());
  EXPECT_FALSE(schedule.restore({0, 0, 1, 0, false}, 50, 51).ok());
  EXPECT_FALSE(schedule.restore({2, 3, 1, 0, false}, 50, 51).ok());
  EXPECT_FALSE(schedule.restore({2, 0, 7, 0, true}, 50, 51).ok());
  EXPECT_FALSE(schedule.restore({2, 0, 0, 0, true}, 50, 51).ok());
  EXPECT_FALSE(schedule.restore({2, 0, 1, 7, true}, 50, 51).ok());
}

// Counters that as many updates cannot have led to, whatever the scalers were.
TEST(ZeroOneSchedule, RefusesCountersOfAnotherStep) {
  ZeroOneSchedule schedule(params(40, 3, 7, 6));
  EXPECT_TRUE(schedule.restore({8, 2, 1, 0, false}, 9, 10).ok());
  const Status later = schedule.restore({64, 0, 1, 0, false}, 9, 10);
  EXPECT_EQ(later.code(), Code::kInvalidArgument);
  EXPECT_NE(later.text().find("9 updates do not lead to variance interval 64"), std::string::npos);
  EXPECT_FALSE(schedule.restore({1, 2, 1, 0, false}, 1, 2).ok());
  EXPECT_FALSE(schedule.restore({1, 0, 1, 3, true}, 2, 3).ok());
  EXPECT_TRUE(schedule.restore({1, 0, 1, 0, false}, 0, 0).ok());
}

}  // namespace
}  // namespace sotto
