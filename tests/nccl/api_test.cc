// How NCCL is found, and what it is told when it is loaded.
#include "transports/nccl/api.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/support/ranks.h"

namespace sotto::test {
namespace {

constexpr char kGraphRegister[] = "NCCL_GRAPH_REGISTER";

void set(const char* variable) {
  variable == nullptr ? unsetenv(kGraphRegister) : setenv(kGraphRegister, variable, 1);
}

class NcclApi : public testing::Test {
 protected:
  void TearDown() override { set("0"); }  // as other tests have it
};

bool registers(const char* variable) {
  set(variable);
  return check(nccl::load(""))->registers_captured;
}

// The test has loaded it: its variables may have been read.
TEST_F(NcclApi, MayRegisterMemoryOfGraphsUnlessItWasToldNotTo) {
  EXPECT_TRUE(registers(nullptr));
  EXPECT_EQ(std::getenv(kGraphRegister), nullptr);
  EXPECT_TRUE(registers("1"));
  EXPECT_FALSE(registers("0"));
}

// One that nothing has loaded, and that is refused behind that.
TEST_F(NcclApi, IsToldToRegisterNoneWhereItIsLoadedHere) {
  for (const char* variable : {static_cast<const char*>(nullptr), "1"}) {
    set(variable);
    EXPECT_EQ(nccl::load(SOTTO_INCOMPLETE_NCCL).status().code(), Code::kUnsupported);
    EXPECT_STREQ(std::getenv(kGraphRegister), variable == nullptr ? "0" : variable);
  }
}

}  // namespace
}  // namespace sotto::test
