// Words in messages.
#include "core/base/text.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace sotto {
namespace {

TEST(Text, CountsHaveTheirUnit) {
  EXPECT_EQ(counted(uint64_t{1}, "rank"), "1 rank");
  EXPECT_EQ(counted(uint64_t{0}, "rank"), "0 ranks");
  EXPECT_EQ(counted(int32_t{1}, "data-parallel rank"), "1 data-parallel rank");
  EXPECT_EQ(counted(int32_t{12}, "data-parallel rank"), "12 data-parallel ranks");
}

}  // namespace
}  // namespace sotto
