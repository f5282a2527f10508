// Whole grids, and the registry of kernels.
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>

#include "tests/support/fake_cuda/kernel_registry.h"
#include "tests/support/simt/registry.h"
#include "tests/support/simt/scheduler.h"

// Null in programs without the fake CUDA runtime.
extern "C" __attribute__((weak)) decltype(fake_cuda_register_kernel) fake_cuda_register_kernel;

namespace simt {
namespace {

// Of the newest architectures.
constexpr uint64_t kMaxThreads = 1024, kMaxShared = 227 * 1024;
constexpr uint64_t kMaxBlocksX = 0x7fffffff, kMaxBlocksYZ = 65535;

struct Registry {
  std::mutex mutex;
  std::map<const void*, Kernel> by_function;
  std::map<std::string, Kernel, std::less<>> by_name;
};
Registry& registry() {
  static Registry the;
  return the;
}

// What the fake CUDA runtime puts into a stream.
sotto::fake_cuda::Job bind_on_stream(const void* function, void** args,
                                     const sotto::fake_cuda::LaunchShape& shape) {
  const Kernel kernel = find_kernel(function);
  const Grid grid{shape.grid, shape.block, shape.dynamic_smem};
  return [grid, function, body = kernel.bind(function, args)] { run_grid(grid, function, body); };
}

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

void register_kernel(const void* function, Binder bind) {
  {
    const std::lock_guard lock(registry().mutex);
    registry().by_function[function] = {function, bind};
  }
  if (fake_cuda_register_kernel != nullptr) fake_cuda_register_kernel(function, &bind_on_stream);
}
void register_kernel_name(std::string_view mangled, const void* function, Binder bind) {
  const std::lock_guard lock(registry().mutex);
  registry().by_name[std::string(mangled)] = {function, bind};
}
Kernel find_kernel(const void* function) {
  const std::lock_guard lock(registry().mutex);
  const auto at = registry().by_function.find(function);
  return at == registry().by_function.end() ? Kernel{} : at->second;
}
Kernel find_kernel_name(std::string_view mangled) {
  const std::lock_guard lock(registry().mutex);
  const auto at = registry().by_name.find(mangled);
  return at == registry().by_name.end() ? Kernel{} : at->second;
}

}  // namespace simt
