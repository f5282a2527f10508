// Where NCCL accesses the memory of one group. Device memory of the communicator's device and
// pinned host memory are accessed as they are, other host memory through pinned blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/status.h"
#include "transports/nccl/pools.h"

namespace sotto::nccl {

class Staging {
 public:
  Staging(PinnedPool& pool, int device) : pool_(pool), device_(device) {}

  // The memory itself, or a pinned block in its place, with what is to be sent (not `received`).
  // INVALID_ARGUMENT: it is another device's. `captured`: a graph keeps the place, so blocks are
  // refused.
  Result<void*> reachable(void* memory, uint64_t bytes, bool received, bool captured);
  // Copies what NCCL has received to the memory that it is for.
  void deliver() const;
  // Gives the blocks back.
  void release();

 private:
  struct Block {
    void* memory;
    std::byte* at;
    uint64_t bytes;
    bool received;
  };

  PinnedPool& pool_;
  const int device_;
  std::vector<Block> blocks_;
};

}  // namespace sotto::nccl
