#include "tests/support/processes.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

namespace sotto::test {
namespace {

SOTTO_RANK_MAIN(support_hello) {
  std::printf("hello from %d of %d\nargument %s\n", self.rank, self.size, self.argument.c_str());
  self.say("rank " + std::to_string(self.rank));
  const char* value = std::getenv("SUPPORT_TEST_VALUE");
  self.say(value == nullptr ? "none" : value);
  return 0;
}

SOTTO_RANK_MAIN(support_fail) {
  if (self.rank == 1) throw RankError("no data");
  self.at("middle");
  for (;;) pause();
}

SOTTO_RANK_MAIN(support_stop) {
  self.at("first");
  self.at("second");
  self.say("past it");
  return 7;
}

SOTTO_RANK_MAIN(support_loud) {
  const std::string line(1000, 'x');
  for (int i = 0; i < 1000; ++i) std::puts(line.c_str());
  return 0;
}

TEST(Processes, RunAndAreHeard) {
  Processes ranks("support_hello", 3,
                  {.argument = "a b", .environment = {"SUPPORT_TEST_VALUE=42"}});
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(ranks.message(rank), "rank " + std::to_string(rank));
    EXPECT_EQ(ranks.message(rank), "42");
  }
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "");
  EXPECT_EQ(ranks.output(2), "hello from 2 of 3\nargument a b\n");
  EXPECT_NE(ranks.prefixed_output().find("[1] hello from 1 of 3\n[1] argument a b\n"),
            std::string::npos);
}

TEST(Processes, TheFirstFailureIsNamed) {
  Processes ranks("support_fail", 3);
  EXPECT_EQ(ranks.wait(1).status, 1);
  ranks.await(0, "middle");
  ranks.await(2, "middle");
  EXPECT_TRUE(ranks.running(0));
  ranks.kill(0, SIGKILL);
  ranks.kill(2, SIGKILL);
  ranks.wait_all();
  EXPECT_TRUE(ranks.exit_of(0).killed);
  EXPECT_EQ(ranks.exit_of(2).signal, SIGKILL);
  EXPECT_EQ(ranks.failure(), "rank 1 ended with 1: no data\n");
  EXPECT_THROW(ranks.kill(0, SIGKILL), RankError);
}

TEST(Processes, StopAtAPoint) {
  Processes ranks("support_stop", 2, {.stop_at = {"1:second"}});
  ranks.await(1, "first");
  ranks.await(1, "second");
  EXPECT_EQ(ranks.wait(0).status, 7);
  EXPECT_TRUE(ranks.running(1));
  ranks.go(1);
  EXPECT_EQ(ranks.message(1), "past it");
  EXPECT_EQ(ranks.wait(1).status, 7);
  EXPECT_NE(ranks.failure(), "");
}

TEST(Processes, AStoppedProcessGoesOn) {
  Processes ranks("support_stop", 1, {.stop_at = {"0:second"}});
  ranks.await(0, "second");
  ranks.kill(0, SIGSTOP);
  ranks.go(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_TRUE(ranks.running(0));
  ranks.kill(0, SIGCONT);
  EXPECT_EQ(ranks.wait(0).status, 7);
}

std::string text_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const RankError& e) {
    return e.what();
  }
  return "";
}

TEST(Processes, WaitingForWhatDoesNotComeEnds) {
  {
    Processes ranks("support_fail", 2);
    const std::string text = text_of([&] { ranks.await(1, "middle"); });
    EXPECT_NE(text.find("rank 1 ended before it came to \"middle\""), std::string::npos) << text;
    EXPECT_NE(text.find("[1] no data"), std::string::npos) << text;
    EXPECT_NE(text_of([&] { ranks.message(1); }).find("without a message"), std::string::npos);
  }
  Processes ranks("support_fail", 1, {.timeout_ms = 200});
  const std::string text = text_of([&] { ranks.wait(0); });
  EXPECT_NE(text.find("time is over"), std::string::npos) << text;
}

TEST(Processes, MuchOutputDoesNotBlock) {
  Processes ranks("support_loud", 1);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "");
  EXPECT_EQ(ranks.output(0).size(), 1001u * 1000u);
}

TEST(Processes, AnUnknownMainFails) {
  Processes ranks("there is none", 1);
  EXPECT_EQ(ranks.wait(0).status, 2);
  EXPECT_NE(ranks.failure().find("there is none"), std::string::npos);
}

TEST(Processes, EndWithTheirObject) {
  pid_t pid = 0;
  {
    Processes ranks("support_fail", 1);
    ranks.await(0, "middle");
    pid = ranks.pid(0);
  }
  EXPECT_EQ(::kill(pid, 0), -1);
}

}  // namespace
}  // namespace sotto::test
