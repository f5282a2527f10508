// Scratch memory of runs on one device. Plans whose runs follow on each other share a pool, which
// then holds what the largest of them needs instead of the sum. A run does not find what another
// has left: plans write what they read.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/iface/device.h"

namespace sotto {

struct ScratchBlock {
  void* memory = nullptr;
  uint64_t bytes = 0;
};

class ScratchPool {
 public:
  explicit ScratchPool(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  // All blocks must have been given back.
  ~ScratchPool();
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;

  const std::shared_ptr<Device>& device() const { return device_; }
  // The smallest free block of as many bytes, or more. Where all are smaller, the largest of them
  // is replaced. So there are as many blocks as runs were under way at a time, and blocks only
  // grow.
  Result<ScratchBlock> take(uint64_t bytes);
  void give_back(ScratchBlock block);
  // Bytes of all blocks.
  uint64_t held_bytes() const;

 private:
  void release(const ScratchBlock& block);

  const std::shared_ptr<Device> device_;
  mutable std::mutex mutex_;
  std::vector<ScratchBlock> free_;  // by size, ascending
  uint64_t held_bytes_ = 0;
};

}  // namespace sotto
