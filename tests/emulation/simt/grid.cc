#include <algorithm>
#include <numeric>
#include <thread>

#include "tests/emulation/simt/scheduler.h"

namespace simt {
namespace {

// Of the newest architectures.
constexpr uint64_t kMaxThreads = 1024, kMaxShared = 227 * 1024;
constexpr uint64_t kMaxBlocksX = 0x7fffffff, kMaxBlocksYZ = 65535;

uint3 block_index(const Grid& grid, uint64_t block) {
  const uint64_t x = grid.blocks.x, y = grid.blocks.y;
  return {static_cast<unsigned>(block % x), static_cast<unsigned>(block / x % y),
          static_cast<unsigned>(block / (x * y))};
}

}  // namespace

Options& options() {
  static Options the;
  return the;
}

bool valid_grid(const Grid& grid) {
  const uint64_t threads = uint64_t{grid.threads.x} * grid.threads.y * grid.threads.z;
  return threads != 0 && threads <= kMaxThreads && grid.threads.z <= 64 && grid.blocks.x != 0 &&
         grid.blocks.y != 0 && grid.blocks.z != 0 && grid.blocks.x <= kMaxBlocksX &&
         grid.blocks.y <= kMaxBlocksYZ && grid.blocks.z <= kMaxBlocksYZ &&
         grid.dynamic_shared <= kMaxShared;
}

void run_grid(const Grid& grid, const void* code, const std::function<void()>& body) {
  const Options now = options();
  std::vector<uint64_t> order(uint64_t{grid.blocks.x} * grid.blocks.y * grid.blocks.z);
  std::iota(order.begin(), order.end(), uint64_t{0});
  std::mt19937 random(now.seed);
  if (now.seed != 0) std::shuffle(order.begin(), order.end(), random);
  // Fixed shares, so that a seed names one order.
  const auto work = [&](uint32_t worker, uint32_t workers) {
    thread_local Scheduler scheduler;
    scheduler.seed(now.seed == 0 ? 0 : now.seed * 7919u + worker);
    for (uint64_t i = worker; i < order.size(); i += workers)
      scheduler.run_block(grid, block_index(grid, order[i]), code, body);
  };
  const auto workers =
      static_cast<uint32_t>(std::min<uint64_t>(std::max(now.workers, 1u), order.size()));
  std::vector<std::thread> others;
  for (uint32_t w = 1; w < workers; ++w) others.emplace_back(work, w, workers);
  work(0, workers);
  for (std::thread& other : others) other.join();
}

}  // namespace simt
