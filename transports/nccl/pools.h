// Pinned memory and events of the transport, which are used again.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "core/base/status.h"

namespace sotto::nccl {

// Pinned memory in blocks that are used again, so that nothing is allocated in steady state.
class PinnedPool {
 public:
  explicit PinnedPool(int device) : device_(device) {}
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // At least `bytes`, aligned to 128 bytes. A block that is not there is allocated, and CUDA may
  // wait for the device in that, and so for streams that are held until others go on.
  Result<std::byte*> take(uint64_t bytes);
  // Makes n such blocks.
  Status reserve(uint64_t bytes, uint64_t n);
  void give_back(std::byte* at);
  // Something may access it for ever: it is not freed.
  void leave_behind() { allocated_.clear(); }

 private:
  static uint64_t block_size(uint64_t bytes);

  const int device_;
  std::vector<void*> allocated_;
  std::map<std::byte*, uint64_t> sizes_;              // of blocks
  std::map<uint64_t, std::vector<std::byte*>> free_;  // by size
};

class EventPool {
 public:
  explicit EventPool(int device) : device_(device) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  Result<cudaEvent_t> take();
  void give_back(cudaEvent_t event) { free_.push_back(event); }
  // Nothing that was given back is destroyed.
  void leave_behind() { free_.clear(); }

 private:
  const int device_;
  std::vector<cudaEvent_t> free_;
};

}  // namespace sotto::nccl
