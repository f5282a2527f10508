#include "transports/nccl/pools.h"

#include <algorithm>
#include <bit>
#include <system_error>
#include <thread>
#include <utility>

#include "core/base/log.h"
#include "cuda/calls/blocked_streams.h"
#include "cuda/calls/cuda_calls.h"

namespace sotto::nccl {
namespace {

constexpr uint64_t kSmallestBlock = 4096;

}  // namespace

// Not on this thread, whose work they may wait for, while streams are blocked.
PinnedPool::~PinnedPool() {
  const auto give_back = [device = device_, all = std::move(allocated_)] {
    const OnDevice on(device);
    for (void* const memory : all) (void)cudaFreeHost(memory);
  };
  if (const NoneBlocked now(device_, std::chrono::milliseconds(0)); now.holds()) {
    give_back();
    return;
  }
  try {
    std::thread([device = device_, give_back] {
      const NoneBlocked later(device);
      give_back();
    }).detach();
  } catch (const std::system_error&) {
    log(LogLevel::kError,
        "nccl: there is no thread to give back pinned memory on cuda:{}, which is left behind",
        device_);
  }
}

uint64_t PinnedPool::block_size(uint64_t bytes) {
  return std::bit_ceil(std::max(bytes, kSmallestBlock));
}

Result<std::byte*> PinnedPool::take(uint64_t bytes) {
  std::vector<std::byte*>& free = free_[block_size(bytes)];
  if (free.empty()) SOTTO_TRY(reserve(bytes, 1));
  std::byte* const at = free.back();
  free.pop_back();
  return at;
}

Status PinnedPool::reserve(uint64_t bytes, uint64_t n) {
  const uint64_t size = block_size(bytes);
  const OnDevice on(device_);
  SOTTO_TRY(on.status());
  void* made = nullptr;
  SOTTO_TRY(cuda_status(cudaHostAlloc(&made, size * n, cudaHostAllocDefault), "cudaHostAlloc"));
  allocated_.push_back(made);
  for (uint64_t i = 0; i < n; ++i) {
    std::byte* const block = static_cast<std::byte*>(made) + i * size;
    sizes_[block] = size;
    free_[size].push_back(block);
  }
  return ok_status();
}

void PinnedPool::give_back(std::byte* at) { free_[sizes_.at(at)].push_back(at); }

EventPool::~EventPool() {
  const OnDevice on(device_);
  for (const cudaEvent_t event : free_) (void)cudaEventDestroy(event);
}

Result<cudaEvent_t> EventPool::take() {
  if (!free_.empty()) {
    const cudaEvent_t event = free_.back();
    free_.pop_back();
    return event;
  }
  const OnDevice on(device_);
  SOTTO_TRY(on.status());
  cudaEvent_t event = nullptr;
  SOTTO_TRY(cuda_status(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                        "cudaEventCreateWithFlags"));
  return event;
}

}  // namespace sotto::nccl
