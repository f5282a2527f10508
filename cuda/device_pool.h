// A memory pool of the library's own on one device. What the process sets for the device's default
// pool does not count for it, nor the other way round.
//
// Devices of one process may access each other's pools, since NCCL copies between them directly.
// That holds for devices on which there is a pool: another process has the others.
//
// Threads: one at a time, but for what is const, which any may call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/base/status.h"

namespace sotto {

class DevicePool {
 public:
  // What is given back stays in the pool up to so many bytes when the device is waited for.
  static constexpr uint64_t kKeptBytes = uint64_t{64} << 20;

  explicit DevicePool(int32_t device) : device_(device) {}
  // What was allocated must have been given back.
  ~DevicePool();
  DevicePool(const DevicePool&) = delete;
  DevicePool& operator=(const DevicePool&) = delete;

  // The device is current.
  Status open();
  cudaMemPool_t handle() const { return pool_; }  // null: the device has no pools

 private:
  const int32_t device_;
  cudaMemPool_t pool_ = nullptr;
};

}  // namespace sotto
