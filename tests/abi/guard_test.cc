// The exception barrier and the error text of a thread.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "capi/src/abi_version.h"
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

TEST(AbiVersion, ALibraryTakesClientsFromItsOldestToItsOwn) {
  constexpr auto v = [](uint32_t major, uint32_t minor) { return major << 16 | minor; };
  const auto code = [](uint32_t client, uint32_t ours, uint32_t oldest) {
    return check_abi_version(client, ours, oldest, "0.1.0").code();
  };
  // 0.2 breaks nothing of 0.1, so its library takes both; the library of 0.1 takes no later client.
  EXPECT_EQ(code(v(0, 1), v(0, 2), v(0, 1)), Code::kOk);
  EXPECT_EQ(code(v(0, 2), v(0, 2), v(0, 1)), Code::kOk);
  EXPECT_EQ(code(v(0, 2), v(0, 1), v(0, 1)), Code::kUnsupported);
  EXPECT_EQ(code(v(0, 0), v(0, 2), v(0, 1)), Code::kUnsupported);
  // A minor that breaks something takes only itself.
  EXPECT_EQ(code(v(0, 2), v(0, 3), v(0, 3)), Code::kUnsupported);
  EXPECT_EQ(code(v(0, 3), v(0, 3), v(0, 3)), Code::kOk);
  EXPECT_EQ(code(v(0, 3), v(1, 3), v(1, 0)), Code::kUnsupported);
  EXPECT_EQ(code(v(1, 2), v(1, 3), v(1, 0)), Code::kOk);
  EXPECT_EQ(code(v(2, 0), v(1, 3), v(1, 0)), Code::kUnsupported);
}

TEST(AbiVersion, ARefusalNamesBothAndWhatIsTaken) {
  const std::string several = check_abi_version(0x3, 0x2, 0x1, "0.1.0").text();
  EXPECT_NE(several.find("sotto.h of ABI 0.3"), std::string::npos) << several;
  EXPECT_NE(several.find("(version 0.1.0) has ABI 0.2 and takes programs of ABI 0.1 to 0.2"),
            std::string::npos)
      << several;
  const std::string one = check_abi_version(0x2, 0x3, 0x3, "0.1.0").text();
  EXPECT_NE(one.find("takes programs of ABI 0.3 only"), std::string::npos) << one;
}

// The version of this header and the earliest that is taken; later ones: future_client.c.
TEST(AbiVersion, TheLibraryOfThisHeaderTakesItsClients) {
  EXPECT_TRUE(check_abi_version(SOTTO_ABI_VERSION, SOTTO_ABI_VERSION, kOldestClient, "").ok());
  EXPECT_TRUE(check_abi_version(kOldestClient, SOTTO_ABI_VERSION, kOldestClient, "").ok());
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
