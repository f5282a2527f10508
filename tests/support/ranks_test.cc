#include "tests/support/ranks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace sotto::test {
namespace {

TEST(Ranks, AllRun) {
  std::atomic<int> mask{0};
  EXPECT_EQ(run_ranks(8, [&](int rank) { mask |= 1 << rank; }), "");
  EXPECT_EQ(mask, 0xff);
}

TEST(Ranks, TheFirstFailureIsReported) {
  const std::string text = run_ranks(3, [&](int rank) {
    if (rank == 2) throw RankError("the cause");
    std::this_thread::sleep_for(std::chrono::seconds(3));
    check(error(Code::kPeerLost, "rank 2 is gone"), "all_reduce");
  });
  EXPECT_EQ(text, "rank 2: the cause");
}

TEST(Ranks, StatusesAndConditions) {
  EXPECT_EQ(run_ranks(1, [](int) { check(error(Code::kBusy, "later"), "start"); }),
            "rank 0: start: BUSY: later");
  EXPECT_EQ(run_ranks(1, [](int) { require(false, "it does not hold"); }),
            "rank 0: it does not hold");
  EXPECT_EQ(run_ranks(1, [](int) { throw 5; }),
            "rank 0: threw something that is no std::exception");
  EXPECT_EQ(check(Result<int>(3)), 3);
}

TEST(RanksDeathTest, AHangEndsWithNames) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto hang = [] {
    const std::string text = run_ranks(
        3,
        [](int rank) {
          if (rank == 0) throw RankError("the cause");
          if (rank == 2) std::this_thread::sleep_for(std::chrono::hours(1));
        },
        5000);
    std::fputs(text.c_str(), stderr);
  };
  EXPECT_EXIT(hang(), testing::ExitedWithCode(3),
              "still running after 5000 ms: ranks 2.*first failure: rank 0: the cause");
}

TEST(RankBarrier, HoldsAgainAndAgain) {
  RankBarrier barrier(4);
  std::atomic<int> count{0};
  EXPECT_EQ(run_ranks(4,
                      [&](int) {
                        for (int round = 1; round <= 100; ++round) {
                          ++count;
                          barrier.wait();
                          require(count == 4 * round, "somebody went on too early");
                          barrier.wait();
                        }
                      }),
            "");
}

TEST(RankBarrier, EndsWithoutEverybody) {
  RankBarrier barrier(2, 50);
  EXPECT_THROW(barrier.wait(), RankError);
}

TEST(RankBarrier, BreaksOff) {
  RankBarrier barrier(2);
  EXPECT_NE(run_ranks(2, [&](int rank) { rank == 0 ? barrier.wait() : barrier.break_off(); }), "");
}

}  // namespace
}  // namespace sotto::test
