#include "core/base/environment.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <thread>

namespace sotto::test {
namespace {

TEST(Environment, SetsWhatIsNotSet) {
  setenv("SOTTO_TEST_SET", "before", 1);
  set_if_unset({{"SOTTO_TEST_SET", "x"}, {"SOTTO_TEST_UNSET", "a=b"}, {"SOTTO_TEST_EMPTY", ""}});
  EXPECT_STREQ(std::getenv("SOTTO_TEST_SET"), "before");
  EXPECT_STREQ(std::getenv("SOTTO_TEST_UNSET"), "a=b");
  EXPECT_STREQ(std::getenv("SOTTO_TEST_EMPTY"), "");
  set_if_unset({{"SOTTO_TEST_UNSET", "y"}});
  EXPECT_STREQ(std::getenv("SOTTO_TEST_UNSET"), "a=b");
  // The system's functions go on from there.
  setenv("SOTTO_TEST_UNSET", "z", 1);
  unsetenv("SOTTO_TEST_EMPTY");
  EXPECT_STREQ(std::getenv("SOTTO_TEST_UNSET"), "z");
  EXPECT_EQ(std::getenv("SOTTO_TEST_EMPTY"), nullptr);
  EXPECT_STREQ(std::getenv("SOTTO_TEST_SET"), "before");
  unsetenv("SOTTO_TEST_SET");
  unsetenv("SOTTO_TEST_UNSET");
}

// With setenv in its place this ends the process in one run of five.
TEST(Environment, OthersReadMeanwhile) {
  std::atomic<bool> done = false;
  std::atomic<uint64_t> found = 0;
  std::thread reader([&] {
    while (!done) found += std::getenv("SOTTO_TEST_NO_SUCH_VARIABLE") != nullptr;
  });
  for (int i = 0; i < 500; ++i) {
    const std::string name = "SOTTO_TEST_" + std::to_string(i);
    set_if_unset({{name.c_str(), "1"}});
  }
  done = true;
  reader.join();
  EXPECT_EQ(found, 0u);
  EXPECT_STREQ(std::getenv("SOTTO_TEST_499"), "1");
  for (int i = 0; i < 500; ++i) unsetenv(("SOTTO_TEST_" + std::to_string(i)).c_str());
}

}  // namespace
}  // namespace sotto::test
