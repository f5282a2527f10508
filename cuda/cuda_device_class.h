// The class behind cuda_device.h.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/iface/device.h"
#include "cuda/calls/cuda_calls.h"
#include "cuda/device_pool.h"
#include "cuda/stream_blocks.h"

namespace sotto {

class CudaDevice final : public Device, public std::enable_shared_from_this<CudaDevice> {
 public:
  explicit CudaDevice(int32_t index) : index_(index), pool_(index), blocks_(index) {
    caps_.id = {DeviceType::kCuda, index};
    caps_.synchronous = false;
    caps_.host_memory = false;
    caps_.lanes = kLanes;
    caps_.background_lanes = true;
    caps_.message_lanes = kMessageLanes;
    caps_.streams = true;
  }
  ~CudaDevice() override;
  Status open();

  const DeviceCaps& caps() const override { return caps_; }
  Result<void*> alloc(uint64_t bytes) override;
  void free(void* memory, uint64_t bytes) override;
  Result<void*> alloc_host(uint64_t bytes) override;
  void free_host(void* memory, uint64_t bytes) override;
  Result<std::shared_ptr<const CallTables>> prepare(std::span<const KernelCall> calls) override;
  Status launch(uint32_t lane, const KernelCall& call,
                std::span<const DiscardedRange> discarded) override;
  // The same on any stream of the device.
  Status launch_on(cudaStream_t stream, const KernelCall& call);
  Status copy_on(cudaStream_t stream, void* dst, const void* src, uint64_t bytes,
                 const uint32_t* predicate, uint32_t expect);
  Status copy(uint32_t lane, void* dst, const void* src, uint64_t bytes, const uint32_t* predicate,
              uint32_t expect) override;
  Result<EventId> record(uint32_t lane) override;
  Status wait(uint32_t lane, EventId event) override;
  Result<bool> query(EventId event) override;
  void release(EventId event) override;
  Status check_stream(void* stream) const override;
  Result<std::shared_ptr<GraphCapture>> capture_graph(void* stream) override;
  Result<EventId> record_stream(void* stream) override;
  Status stream_after_event(void* stream, EventId event) override;
  Result<BlockId> block_stream(void* stream) override;
  void unblock(BlockId block) override { blocks_.unblock(block); }
  Status unblock_behind(uint32_t lane, BlockId block) override;
  Result<void*> lane_stream(uint32_t lane) override;
  // Measuring would take two timed events per kernel.
  uint64_t busy_ns() const override { return 0; }
  // An error of execution that CUDA knows of by now.
  Status health();

 private:
  static constexpr uint32_t kLanes = 4, kMessageLanes = 8;
  class Tables;

  Status check(cudaError_t error, std::string_view call) const {
    return cuda_status(error, call, index_);
  }
  Status bind_context() const;
  Status load_kernels() const;
  Status open_blocks();
  void* take_host(uint64_t bytes);
  Status upload(void* dst, const void* src, uint64_t bytes);
  Status zero(void* memory, uint64_t bytes);
  Status add_events();
  Result<EventId> record_on(cudaStream_t stream);
  cudaEvent_t event_of(EventId id);
  void drain();
  Result<cudaStreamCaptureStatus> capture_of(void* stream) const;
  Result<cudaStream_t> stream_of(uint32_t lane);

  const int32_t index_;
  DeviceCaps caps_;
  DevicePool pool_;
  // Made when the device is opened: kLanes; the others when they are first used.
  std::array<cudaStream_t, 2 * kLanes + kMessageLanes> lanes_{};
  int background_priority_ = 0, message_priority_ = 0;
  cudaStream_t memory_stream_ = nullptr;  // allocates and frees
  StreamBlocks blocks_;
  std::mutex mutex_;                 // guards what follows
  std::vector<cudaEvent_t> events_;  // number id - 1
  std::vector<EventId> free_events_;
  // Pinned memory is kept until the device is closed: giving it back waits for the whole device,
  // and so for streams that are blocked until the thread that gives it back goes on.
  std::unordered_map<void*, uint64_t> host_sizes_;
  std::multimap<uint64_t, void*> free_host_;  // by size
};

}  // namespace sotto
