// The exception barrier and the error text of a thread.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "capi/src/guard.h"

namespace sotto::capi {
namespace {

TEST(Guard, StatusBecomesCodeAndText) {
  EXPECT_EQ(guarded("sotto_f", [] { return invalid_argument("n is {}", 3); }),
            SOTTO_E_INVALID_ARGUMENT);
  EXPECT_STREQ(last_error_text(), "sotto_f: n is 3");
  EXPECT_EQ(guarded("sotto_f", [] { return ok_status(); }), SOTTO_OK);
  EXPECT_STREQ(last_error_text(), "");
}

TEST(Guard, TextIsClearedOnEntry) {
  set_last_error("sotto_f", "stale");
  guarded("sotto_g", [] {
    EXPECT_STREQ(last_error_text(), "");
    return ok_status();
  });
}

TEST(Guard, NotYetIsNoError) {
  EXPECT_EQ(guarded("sotto_f", [] { return error(Code::kInProgress, "waiting"); }),
            SOTTO_IN_PROGRESS);
  EXPECT_STREQ(last_error_text(), "");
}

TEST(Guard, NoExceptionLeaves) {
  EXPECT_EQ(guarded("sotto_f", []() -> Status { throw std::bad_alloc(); }), SOTTO_E_OUT_OF_MEMORY);
  EXPECT_STREQ(last_error_text(), "sotto_f: out of memory");
  EXPECT_EQ(guarded("sotto_f", []() -> Status { throw std::runtime_error("broken"); }),
            SOTTO_E_INTERNAL);
  EXPECT_STREQ(last_error_text(), "sotto_f: broken");
  EXPECT_EQ(guarded("sotto_f", []() -> Status { throw 7; }), SOTTO_E_INTERNAL);
  EXPECT_STREQ(last_error_text(), "sotto_f: exception of unknown type");
}

TEST(Guard, LongTextIsCutAtACharacterBorder) {
  const std::string umlauts = [] {
    std::string text;
    for (int i = 0; i < 4000; ++i) text += "\xc3\xa4";
    return text;
  }();
  for (const std::string& pad : {std::string(), std::string("x")}) {
    guarded("sotto_f", [&] { return invalid_argument("{}{}", pad, umlauts); });
    const std::string text = last_error_text();
    EXPECT_LT(text.size(), kLastErrorBytes);
    EXPECT_GT(text.size(), kLastErrorBytes - 8);
    EXPECT_EQ(text.substr(text.size() - 5), "\xc3\xa4...");
  }
}

TEST(Guard, EveryThreadHasItsOwnText) {
  set_last_error("sotto_f", "mine");
  std::thread([] {
    EXPECT_STREQ(last_error_text(), "");
    set_last_error("sotto_f", "theirs");
  }).join();
  EXPECT_STREQ(last_error_text(), "sotto_f: mine");
}

TEST(Guard, CallbackScopeIsPerThread) {
  EXPECT_TRUE(CallbackScope::refuse_inside().ok());
  {
    CallbackScope outer;
    { CallbackScope inner; }
    EXPECT_EQ(CallbackScope::refuse_inside().code(), Code::kInvalidState);
    std::thread([] { EXPECT_TRUE(CallbackScope::refuse_inside().ok()); }).join();
  }
  EXPECT_TRUE(CallbackScope::refuse_inside().ok());
}

TEST(Guard, ForkedChildIsRecognised) {
  const uint32_t generation = fork_generation();
  EXPECT_TRUE(check_not_forked(generation).ok());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) _exit(check_not_forked(generation).code() == Code::kInvalidState ? 0 : 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(check_not_forked(generation).ok());  // the parent goes on
}

}  // namespace
}  // namespace sotto::capi
