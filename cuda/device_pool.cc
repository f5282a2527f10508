#include "cuda/device_pool.h"

#include <map>
#include <mutex>

#include "core/base/log.h"
#include "cuda/calls/cuda_calls.h"

namespace sotto {
namespace {

// The pools of this process, and their devices.
std::mutex g_mutex;
std::map<cudaMemPool_t, int32_t>& pools() {
  static auto* const all = new std::map<cudaMemPool_t, int32_t>;
  return *all;
}

// Lets the peer use what the pool of a device hands out.
Status let_in(cudaMemPool_t pool, int32_t device, int32_t peer) {
  if (device == peer) return ok_status();
  int can = 0;
  SOTTO_TRY(
      cuda_status(cudaDeviceCanAccessPeer(&can, peer, device), "cudaDeviceCanAccessPeer", device));
  if (can == 0) return ok_status();
  cudaMemAccessDesc access{};
  access.location.type = cudaMemLocationTypeDevice;
  access.location.id = peer;
  access.flags = cudaMemAccessFlagsProtReadWrite;
  return cuda_status(cudaMemPoolSetAccess(pool, &access, 1), "cudaMemPoolSetAccess", device);
}

}  // namespace

DevicePool::~DevicePool() {
  if (pool_ == nullptr) return;
  {
    const std::lock_guard lock(g_mutex);
    pools().erase(pool_);
  }
  const OnDevice current(device_);
  const cudaError_t destroyed = cudaMemPoolDestroy(pool_);
  if (destroyed == cudaErrorCudartUnloading) return;  // the process ends
  if (const Status status = cuda_status(destroyed, "cudaMemPoolDestroy", device_); !status.ok())
    log(LogLevel::kError, "{}", status.text());
}

Status DevicePool::open() {
  int supported = 0;
  SOTTO_TRY(
      cuda_status(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, device_),
                  "cudaDeviceGetAttribute", device_));
  if (supported == 0) return ok_status();
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.handleTypes = cudaMemHandleTypeNone;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device_;
  SOTTO_TRY(cuda_status(cudaMemPoolCreate(&pool_, &properties), "cudaMemPoolCreate", device_));
  uint64_t kept = kKeptBytes;
  SOTTO_TRY(cuda_status(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &kept),
                        "cudaMemPoolSetAttribute", device_));
  const std::lock_guard lock(g_mutex);
  for (const auto& [pool, device] : pools()) {
    SOTTO_TRY(let_in(pool_, device_, device));
    SOTTO_TRY(let_in(pool, device, device_));
  }
  pools()[pool_] = device_;
  return ok_status();
}

}  // namespace sotto
