#include "tests/perf/timed_device.h"

#include <time.h>

namespace sotto::perf {
namespace {

uint64_t thread_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

Status TimedDevice::launch(uint32_t lane, const KernelCall& call,
                           std::span<const DiscardedRange> discarded) {
  const uint64_t before = thread_ns();
  Status status = device_.launch(lane, call, discarded);
  times_[static_cast<size_t>(call.id)].fetch_add(thread_ns() - before, std::memory_order_relaxed);
  return status;
}

}  // namespace sotto::perf
