#include "transports/nccl/staging.h"

#include <cuda_runtime_api.h>

#include <cstring>

#include "cuda/calls/cuda_calls.h"

namespace sotto::nccl {

Result<void*> Staging::reachable(void* memory, uint64_t bytes, bool received, bool captured) {
  if (bytes == 0) return memory;
  cudaPointerAttributes at{};
  SOTTO_TRY(cuda_status(cudaPointerGetAttributes(&at, memory), "cudaPointerGetAttributes"));
  switch (at.type) {
    case cudaMemoryTypeHost:
    case cudaMemoryTypeManaged: return memory;
    case cudaMemoryTypeDevice:
      if (at.device == device_) return memory;
      return invalid_argument(
          "nccl: memory is on cuda:{}, but the communicator was made on cuda:{}, the device that "
          "was current",
          at.device, device_);
    case cudaMemoryTypeUnregistered: break;
  }
  if (captured) return error(Code::kInternal, "nccl: memory in a graph that NCCL cannot reach");
  SOTTO_ASSIGN(std::byte* const pinned, pool_.take(bytes));
  blocks_.push_back({memory, pinned, bytes, received});
  if (!received) std::memcpy(pinned, memory, bytes);
  return static_cast<void*>(pinned);
}

void Staging::deliver() const {
  for (const Block& block : blocks_) {
    if (block.received) std::memcpy(block.memory, block.at, block.bytes);
  }
}

void Staging::release() {
  for (const Block& block : blocks_) pool_.give_back(block.at);
  blocks_.clear();
}

}  // namespace sotto::nccl
