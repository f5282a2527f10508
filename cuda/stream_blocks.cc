#include "cuda/stream_blocks.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string_view>

#include "cuda/calls/blocked_streams.h"

namespace sotto {
namespace {

constexpr int kLeastQueues = 8;

// Kernels that are loaded when they are first launched wait for the device with the context's lock,
// and streams that share a hardware queue wait for each other.
Status check_process() {
  const char* const loading = std::getenv("CUDA_MODULE_LOADING");
  const char* const queues = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const bool eager = loading != nullptr && std::string_view(loading) == "EAGER";
  const bool enough = queues == nullptr || std::atoi(queues) >= kLeastQueues;
  if (eager && enough) return ok_status();
  return unsupported(
      "SOTTO_STREAM_BLOCK=1 needs CUDA_MODULE_LOADING=EAGER, which is \"{}\", and "
      "CUDA_DEVICE_MAX_CONNECTIONS of {} or more, which is {}: a blocked stream could block the "
      "process",
      loading == nullptr ? "" : loading, kLeastQueues, queues == nullptr ? "not set" : queues);
}

}  // namespace

Result<StreamBlocks::Block> StreamBlocks::take() {
  const std::lock_guard lock(mutex_);
  const auto usable = [this](BlockId block) {
    return std::atomic_ref(*word(block)).load(std::memory_order_acquire) == values_[block - 1];
  };
  if (const auto it = std::ranges::find_if(free_, usable); it != free_.end()) {
    const BlockId block = *it;
    free_.erase(it);
    return Block{block, ++values_[block - 1]};
  }
  if (values_.size() == kWords) {
    return error(Code::kDevice, "{} streams of cuda:{} wait for operations already, the limit",
                 kWords, device_);
  }
  values_.push_back(1);
  return Block{values_.size(), 1};
}

uint32_t StreamBlocks::value_of(BlockId block) {
  const std::lock_guard lock(mutex_);
  return values_[block - 1];
}

void StreamBlocks::give_back(BlockId block) {
  const std::lock_guard lock(mutex_);
  free_.push_back(block);
}

Result<BlockId> StreamBlocks::block(CUstream stream) {
  if (wait_ == nullptr) {
    return unsupported(
        "a stream cannot wait for an operation that needs the host: this driver has no "
        "cuStreamWaitValue32; use sotto_op_wait");
  }
  SOTTO_TRY(check_process());
  SOTTO_ASSIGN(const Block block, take());
  BlockedStreams::of(device_).add();
  const CUresult result = wait_(stream, reinterpret_cast<CUdeviceptr>(word(block.id)), block.value,
                                CU_STREAM_WAIT_VALUE_GEQ);
  if (result == CUDA_SUCCESS) return block.id;
  unblock(block.id);
  return error(Code::kDevice, "cuStreamWaitValue32 on cuda:{}: error {} of the driver", device_,
               static_cast<int>(result));
}

void StreamBlocks::unblock(BlockId block) {
  std::atomic_ref(*word(block)).store(value_of(block), std::memory_order_release);
  give_back(block);
  BlockedStreams::of(device_).remove();
}

Status StreamBlocks::unblock_behind(CUstream behind, BlockId block) {
  if (write_ == nullptr) return unsupported("this driver has no cuStreamWriteValue32");
  const CUresult result = write_(behind, reinterpret_cast<CUdeviceptr>(word(block)),
                                 value_of(block), CU_STREAM_WRITE_VALUE_DEFAULT);
  if (result != CUDA_SUCCESS) {
    return error(Code::kDevice, "cuStreamWriteValue32 on cuda:{}: error {} of the driver", device_,
                 static_cast<int>(result));
  }
  give_back(block);
  BlockedStreams::of(device_).remove();
  return ok_status();
}

}  // namespace sotto
