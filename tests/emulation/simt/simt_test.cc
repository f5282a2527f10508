// The emulator of CUDA kernels: what right kernels give, and that it catches wrong ones.
#include "tests/emulation/simt/simt.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "tests/emulation/simt/planted.h"
#include "tests/support/sanitized.h"

namespace sotto::test {
namespace {

class Simt : public testing::Test {
 protected:
  // ThreadSanitizer has a thread of its own, so a process that was forked may not start others.
  Simt() { GTEST_FLAG_SET(death_test_style, kThreadSanitizer ? "threadsafe" : "fast"); }
  ~Simt() override { simt::options() = {}; }
  static void order(uint32_t seed, uint32_t workers = 1) { simt::options() = {seed, workers}; }
};
using SimtDeath = Simt;

std::vector<uint32_t> run(std::string_view name, dim3 grid, dim3 block, size_t words,
                          size_t dynamic_shared = 0) {
  std::vector<uint32_t> out(words);
  PlantedArgs args;
  args.out = out.data();
  args.n = words;
  EXPECT_EQ(launch_planted(name, grid, block, dynamic_shared, args), cudaSuccess);
  return out;
}

TEST_F(Simt, CollectivesAreCountedByThread) {
  const uint64_t before = simt::collectives();
  run("neighbours", 8, 256, 8 * 256);
  EXPECT_EQ(simt::collectives() - before, 8 * 256u);
}

TEST_F(Simt, BarriersOrderSharedMemoryInEveryOrder) {
  std::vector<uint32_t> expected(8 * 256);
  for (uint32_t i = 0; i < expected.size(); ++i) expected[i] = i / 256 * 256 + 255 - i % 256;
  for (const uint32_t workers : {1u, 2u}) {
    for (const uint32_t seed : {0u, 1u, 2u, 3u}) {
      order(seed, workers);
      EXPECT_EQ(run("reverse", 8, 256, expected.size()), expected);
      const std::vector<uint32_t> pairs = run("neighbours", 8, 256, expected.size());
      for (uint32_t i = 0; i < pairs.size(); ++i) ASSERT_EQ(pairs[i], (i % 256) ^ 1);
    }
  }
}

// Shared memory is poisoned before each block, so that no block finds what an earlier one left.
TEST_F(Simt, AMissingBarrierGivesWrongValuesInEveryBlock) {
  if (kThreadSanitizer) GTEST_SKIP() << "a data race, which ThreadSanitizer reports";
  for (const uint32_t seed : {0u, 1u, 2u, 3u}) {
    order(seed);
    const std::vector<uint32_t> out = run("reverse_without_barrier", 8, 256, 8 * 256);
    for (uint32_t block = 0; block < 8; ++block) {
      uint32_t wrong = 0;
      for (uint32_t t = 0; t < 256; ++t) wrong += out[block * 256 + t] != block * 256 + 255 - t;
      EXPECT_GT(wrong, 0u) << "block " << block << " seed " << seed;
    }
  }
}

TEST_F(Simt, SharedMemoryStartsPoisoned) {
  for (const uint32_t value : run("uninitialised", 4, 32, 128)) EXPECT_EQ(value, 0xffffffffu);
}

TEST_F(Simt, CollectivesHaveTheResultsOfCuda) {
  for (const uint32_t seed : {0u, 7u}) {
    order(seed);
    const std::vector<uint32_t> out = run("collectives", 2, 128, 2 * 128 * 12);
    for (uint32_t t = 0; t < 128; ++t) {
      const uint32_t* at = out.data() + 12 * (128 + t);
      const uint32_t warp = t / 32 * 32, lane = t % 32;
      uint32_t thirds = 0;
      for (uint32_t l = 0; l < 32; ++l) thirds |= static_cast<uint32_t>((warp + l) % 3 == 0) << l;
      EXPECT_EQ(at[0], thirds);
      EXPECT_EQ(at[1], warp == 0);
      EXPECT_EQ(at[2], t < 64);
      EXPECT_EQ(at[3], t / 8 * 8 + 3);
      EXPECT_EQ(at[4], t ^ 5);
      EXPECT_EQ(at[5], lane % 16 < 2 ? t : t - 2);
      EXPECT_EQ(at[6], lane + 3 >= 32 ? t : t + 3);
      EXPECT_EQ(at[7], 1u);
      EXPECT_EQ(at[8], 32u);
      EXPECT_EQ(at[9], 1u);
      EXPECT_EQ(at[10], 1u);
      EXPECT_EQ(at[11], std::popcount(t) + (t == 0 ? 0 : std::countr_zero(t) + 1));
    }
  }
}

TEST_F(Simt, ThreadsAreWhereTheyShouldBe) {
  for (const uint32_t seed : {0u, 5u}) {
    order(seed);
    const std::vector<uint32_t> out = run("positions", dim3(2, 3, 2), dim3(5, 3, 4), 12 * 60);
    for (uint32_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], 1 + i % 60);
  }
}

TEST_F(Simt, WhoHasEndedIsNotWaitedFor) {
  const std::vector<uint32_t> out = run("half_ends", 1, 128, 64);
  for (const uint32_t count : out) EXPECT_EQ(count, 32u);
}

TEST_F(Simt, ABranchMayHaveCollectivesOfItsOwn) {
  for (const uint32_t seed : {0u, 1u, 2u}) {
    order(seed);
    const std::vector<uint32_t> out = run("branches", 1, 64, 64);
    for (uint32_t t = 0; t < 64; ++t)
      EXPECT_EQ(out[t], t % 32 >= 16 ? 0xaaaa0000u | 0x11111111u : 0x11111111u);
  }
}

TEST_F(Simt, AtomicsMeetFromAllBlocksAndWorkers) {
  order(3, 2);
  EXPECT_EQ(run("count_blocks", 100, 33, 1)[0], 3300u);
}

TEST_F(Simt, ASeedNamesAnOrderAndOrdersDiffer) {
  if (kThreadSanitizer) GTEST_SKIP() << "data races, which ThreadSanitizer reports";
  for (const char* name : {"last_block", "last_thread"}) {
    std::set<uint32_t> results;
    order(0);
    EXPECT_EQ(run(name, 64, 64, 1)[0], 63u);
    for (uint32_t seed = 1; seed < 8; ++seed) {
      order(seed);
      const uint32_t first = run(name, 64, 64, 1)[0];
      EXPECT_EQ(run(name, 64, 64, 1)[0], first);
      results.insert(first);
    }
    EXPECT_GT(results.size(), 1u) << name;
  }
}

TEST_F(Simt, LanesOutsideOfTheMaskAreUnreadable) {
  for (const uint32_t value : run("read_outside_mask", 1, 32, 16)) EXPECT_EQ(value, 0xdeadbeefu);
}

TEST_F(Simt, GridsThatCudaRefusesAreRefused) {
  std::vector<uint32_t> out(1);
  const PlantedArgs args{out.data(), nullptr, 0};
  for (const auto& [grid, block, shared] :
       std::vector<std::tuple<dim3, dim3, size_t>>{{0, 1, 0},
                                                   {1, 0, 0},
                                                   {1, 1025, 0},
                                                   {1, dim3(32, 32, 2), 0},
                                                   {1, dim3(1, 1, 65), 0},
                                                   {dim3(1, 65536), 1, 0},
                                                   {1, 1, 228 * 1024}}) {
    EXPECT_EQ(launch_planted("positions", grid, block, shared, args),
              cudaErrorInvalidConfiguration);
  }
  EXPECT_EQ(out[0], 0u);
}

TEST_F(SimtDeath, BarriersThatNotAllReach) {
  EXPECT_DEATH(run("divergent_barrier", 1, 64, 64), "simt: no thread of the block can go on");
  EXPECT_DEATH(run("divergent_barrier", 1, 64, 64), "at the barrier .*planted.cu:[0-9]+");
  EXPECT_DEATH(run("different_barriers", 1, 64, 64),
               "simt: threads of one block wait at different");
}

TEST_F(SimtDeath, MasksAndCollectivesThatDoNotAgree) {
  EXPECT_DEATH(run("foreign_mask", 1, 32, 32), "simt: a lane is not in its own mask.*planted.cu");
  for (const uint32_t seed : {0u, 1u}) {
    order(seed);
    EXPECT_DEATH(run("different_masks", 1, 32, 32), "simt: lanes of one warp meet");
    EXPECT_DEATH(run("different_collectives", 1, 32, 32), "simt: lanes of one warp meet");
  }
  EXPECT_DEATH(run("odd_width", 1, 32, 32), "simt: a shuffle's width is a power of two up to 32");
}

TEST_F(SimtDeath, MemoryBehindTheEnd) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory =
      mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  ASSERT_EQ(mprotect(static_cast<char*>(memory) + page, page, PROT_NONE), 0);
  PlantedArgs args;
  args.n = 100;
  args.out = reinterpret_cast<uint32_t*>(static_cast<char*>(memory) + page) - args.n;
  EXPECT_DEATH(launch_planted("out_of_bounds", 1, 128, 0, args), "");
  munmap(memory, 2 * page);
  EXPECT_EQ(run("beyond_dynamic_shared", 1, 64, 64, 256)[63], 63u);
  EXPECT_DEATH(run("beyond_dynamic_shared", 1, 64, 64, 240), "");
#if defined(__SANITIZE_ADDRESS__)
  EXPECT_DEATH(run("out_of_bounds", 1, 128, 100), "heap-buffer-overflow(.|\n)*planted.cu");
#endif
}

TEST_F(SimtDeath, VectorsThatAreNotAligned) {
  std::vector<uint32_t> out(1);
  alignas(16) const float in[8] = {};
  const PlantedArgs args{out.data(), in, 0};
  EXPECT_DEATH(launch_planted("misaligned", 1, 1, 0, args), "planted.cu.*misaligned address");
}

#if defined(__SANITIZE_THREAD__)
// Reports end the process with a code of their own.
TEST_F(SimtDeath, RacesOfThreadsAndOfBlocks) {
  const auto raced = testing::ExitedWithCode(66);
  const auto go = [](const char* name, uint32_t workers) {
    order(0, workers);
    run(name, 8, 64, 8 * 64);
    exit(0);
  };
  EXPECT_EXIT(go("reverse_without_barrier", 1), raced, "data race(.|\n)*planted.cu");
  EXPECT_EXIT(go("neighbours_without_barrier", 1), raced, "data race(.|\n)*planted.cu");
  EXPECT_EXIT(go("count_blocks_without_atomic", 2), raced, "data race(.|\n)*planted.cu");
  EXPECT_EXIT(go("reverse", 2), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(go("neighbours", 2), testing::ExitedWithCode(0), "");
}
#endif

}  // namespace
}  // namespace sotto::test
