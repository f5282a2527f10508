// Which steps have to wait for which, from the bytes that they touch.
#include "core/plan/hazards.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace sotto::test {
namespace {

using Waits = std::vector<uint32_t>;

class HazardsTest : public testing::Test {
 protected:
  Waits reads(uint32_t step, uint64_t begin, uint64_t end, uint32_t slot = 0) {
    return touch(step, begin, end, slot, Access::kRead);
  }
  Waits writes(uint32_t step, uint64_t begin, uint64_t end, uint32_t slot = 0) {
    return touch(step, begin, end, slot, Access::kWrite);
  }
  // Sorted, each once.
  Waits touch(uint32_t step, uint64_t begin, uint64_t end, uint32_t slot, Access access) {
    Waits waits;
    hazards_.touch(step, {{slot, begin, end - begin}, access}, &waits);
    std::sort(waits.begin(), waits.end());
    waits.erase(std::unique(waits.begin(), waits.end()), waits.end());
    return waits;
  }
  Hazards hazards_{2};
};

TEST_F(HazardsTest, ReadsWaitForTheLastWriteAlone) {
  EXPECT_EQ(writes(0, 0, 100), Waits{});
  EXPECT_EQ(writes(1, 0, 100), Waits{0});
  EXPECT_EQ(reads(2, 0, 100), Waits{1});
  EXPECT_EQ(reads(3, 0, 100), Waits{1});  // not for the other read
}

TEST_F(HazardsTest, WritesWaitForTheLastWriteAndAllReadsSince) {
  writes(0, 0, 100);
  reads(1, 0, 50);
  reads(2, 50, 100);
  EXPECT_EQ(writes(3, 40, 60), (Waits{0, 1, 2}));
  EXPECT_EQ(writes(4, 0, 40), (Waits{0, 1}));
  EXPECT_EQ(writes(5, 40, 60), Waits{3});  // earlier ones are implied
}

TEST_F(HazardsTest, WhatIsReadAndWrittenIsBoth) {
  writes(0, 0, 100);
  reads(1, 0, 100);
  EXPECT_EQ(touch(2, 0, 100, 0, Access::kReadWrite), (Waits{0, 1}));
  EXPECT_EQ(reads(3, 0, 100), Waits{2});
}

TEST_F(HazardsTest, BytesThatDoNotOverlapAreIndependent) {
  writes(0, 0, 10);
  EXPECT_EQ(writes(1, 10, 20), Waits{});
  EXPECT_EQ(reads(2, 20, 30), Waits{});
  EXPECT_EQ(writes(3, 0, 10, 1), Waits{});  // another slot
  EXPECT_EQ(reads(4, 9, 11), (Waits{0, 1}));
}

TEST_F(HazardsTest, WritesOfPartsLeaveTheRest) {
  writes(0, 0, 100);
  writes(1, 20, 30);
  writes(2, 60, 70);
  EXPECT_EQ(reads(3, 0, 20), Waits{0});
  EXPECT_EQ(reads(4, 25, 65), (Waits{0, 1, 2}));
  EXPECT_EQ(writes(5, 0, 100), (Waits{0, 1, 2, 3, 4}));
}

TEST_F(HazardsTest, AReadAcrossGapsIsKnownInThem) {
  writes(0, 10, 20);
  writes(1, 40, 50);
  EXPECT_EQ(reads(2, 0, 100), (Waits{0, 1}));
  EXPECT_EQ(writes(3, 25, 30), Waits{2});
  EXPECT_EQ(writes(4, 90, 200), Waits{2});
}

TEST_F(HazardsTest, AStepDoesNotWaitForItself) {
  EXPECT_EQ(reads(0, 0, 10), Waits{});
  EXPECT_EQ(writes(0, 5, 15), Waits{});
  EXPECT_EQ(reads(0, 0, 15), Waits{});
  EXPECT_EQ(reads(1, 0, 15), Waits{0});
}

TEST_F(HazardsTest, NoBytesTouchNothing) {
  writes(0, 0, 10);
  EXPECT_EQ(writes(1, 5, 5), Waits{});
  EXPECT_EQ(reads(2, 0, 10), Waits{0});
}

// Against the definition, byte by byte.
TEST_F(HazardsTest, RandomTouchesAgreeWithTheDefinition) {
  constexpr uint64_t kBytes = 24;
  struct Byte {
    uint32_t writer = kNoStep;
    Waits readers;
  };
  std::vector<Byte> bytes(kBytes);
  uint64_t state = 1;
  const auto random = [&](uint64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
  };
  for (uint32_t step = 0; step < 2000; ++step) {
    const uint64_t begin = random(kBytes), end = begin + 1 + random(kBytes - begin);
    const bool write = random(3) == 0;
    Waits expected;
    for (uint64_t b = begin; b < end; ++b) {
      Byte& byte = bytes[b];
      if (byte.writer != kNoStep) expected.push_back(byte.writer);
      if (write) {
        expected.insert(expected.end(), byte.readers.begin(), byte.readers.end());
        byte = {step, {}};
      } else {
        byte.readers.push_back(step);
      }
    }
    std::sort(expected.begin(), expected.end());
    expected.erase(std::unique(expected.begin(), expected.end()), expected.end());
    ASSERT_EQ(write ? writes(step, begin, end) : reads(step, begin, end), expected)
        << "step " << step;
  }
}

}  // namespace
}  // namespace sotto::test
