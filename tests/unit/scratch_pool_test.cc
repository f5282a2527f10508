// Scratch memory that plans share: what is reused, what is replaced, and how much is held.
#include "core/engine/scratch_pool.h"

#include <gtest/gtest.h>

#include "core/cpu/cpu_device.h"

namespace sotto {
namespace {

class ScratchPoolTest : public testing::Test {
 protected:
  ScratchBlock take(uint64_t bytes) { return pool_.take(bytes).take(); }
  ScratchPool pool_{make_cpu_device(1, SimdLevel::kAuto).take()};
};

TEST_F(ScratchPoolTest, WhatFollowsOnEachOtherNeedsTheLargest) {
  for (const uint64_t bytes : {uint64_t{100}, uint64_t{5000}, uint64_t{1}, uint64_t{0}}) {
    const ScratchBlock block = take(bytes);
    EXPECT_GE(block.bytes, bytes);
    EXPECT_NE(block.memory, nullptr);
    pool_.give_back(block);
  }
  EXPECT_EQ(pool_.held_bytes(), 5000u);
}

TEST_F(ScratchPoolTest, WhatIsUnderWayAtATimeHasBlocksOfItsOwn) {
  const ScratchBlock large = take(5000), small = take(100);
  EXPECT_NE(large.memory, small.memory);
  EXPECT_EQ(pool_.held_bytes(), 5100u);
  pool_.give_back(large);
  pool_.give_back(small);
  const ScratchBlock fits = take(80);
  EXPECT_EQ(fits.memory, small.memory) << "the smallest that is large enough";
  const ScratchBlock other = take(80);
  EXPECT_EQ(other.memory, large.memory);
  pool_.give_back(fits);
  pool_.give_back(other);
  EXPECT_EQ(pool_.held_bytes(), 5100u);
  // None is large enough: the largest makes room.
  pool_.give_back(take(6000));
  EXPECT_EQ(pool_.held_bytes(), 6100u);
}

}  // namespace
}  // namespace sotto
