// Which ranks are on one host.
#include "core/group/hosts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/host.h"

namespace sotto {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(Hosts, OneMachineIsOneHost) {
  EXPECT_FALSE(host_name().empty());
  EXPECT_EQ(host_number("", host_name(), boot_id()), host_number("", host_name(), boot_id()));
  EXPECT_NE(host_number("", "node", "boot"), 0u);
}

TEST(Hosts, ContainersOfOneNameOnTwoMachinesAreTwo) {
  EXPECT_NE(host_number("", "node", "boot 1"), host_number("", "node", "boot 2"));
  EXPECT_NE(host_number("", "node 1", "boot"), host_number("", "node 2", "boot"));
  EXPECT_NE(host_number("", "ab", "c"), host_number("", "a", "bc"));
}

TEST(Hosts, ANamedHostIsWhatItsNameSays) {
  EXPECT_EQ(host_number("seven", "node 1", "boot 1"), host_number("seven", "node 2", "boot 2"));
  EXPECT_NE(host_number("seven", "node", "boot"), host_number("eight", "node", "boot"));
  EXPECT_NE(host_number("node", "node", ""), host_number("", "node", ""));
}

TEST(Hosts, IndicesFollowTheLowestRanks) {
  EXPECT_THAT(host_indices(std::vector<uint64_t>{9, 4, 9, 1, 4, 9}), ElementsAre(0, 1, 0, 2, 1, 0));
  EXPECT_THAT(host_indices(std::vector<uint64_t>{5}), ElementsAre(0));
  EXPECT_THAT(host_indices({}), IsEmpty());
}

}  // namespace
}  // namespace sotto
