// Calls of a device as nodes of a CUDA graph. The first and the last node count launches in pinned
// memory, which the host reads.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "cuda/cuda_device_class.h"

namespace sotto {

class CudaGraphCapture final : public GraphCapture {
 public:
  // The stream is being captured.
  static Result<std::shared_ptr<GraphCapture>> make(std::shared_ptr<CudaDevice> device,
                                                    cudaStream_t stream);
  ~CudaGraphCapture() override { device_->free_host(counts_, kCountBytes); }

  Status finish() override;
  uint32_t begun() const override { return count(kBegun); }
  uint32_t ended() const override { return count(kEnded); }
  Status health() override { return device_->health(); }

  const DeviceCaps& caps() const override { return caps_; }
  Result<void*> alloc(uint64_t bytes) override { return device_->alloc(bytes); }
  void free(void* memory, uint64_t bytes) override { device_->free(memory, bytes); }
  Result<void*> alloc_host(uint64_t bytes) override { return device_->alloc_host(bytes); }
  void free_host(void* memory, uint64_t bytes) override { device_->free_host(memory, bytes); }
  Result<std::shared_ptr<const CallTables>> prepare(std::span<const KernelCall> calls) override {
    return device_->prepare(calls);
  }
  Status launch(uint32_t lane, const KernelCall& call,
                std::span<const DiscardedRange> discarded) override;
  Status copy(uint32_t lane, void* dst, const void* src, uint64_t bytes, const uint32_t* predicate,
              uint32_t expect) override;
  Result<EventId> record(uint32_t lane) override;
  Status wait(uint32_t lane, EventId event) override;
  Result<bool> query(EventId event) override;
  void release(EventId event) override;
  Status check_stream(void* stream) const override { return device_->check_stream(stream); }
  Result<EventId> record_stream(void* stream) override { return device_->record_stream(stream); }
  Status stream_after_event(void* stream, EventId event) override {
    return device_->stream_after_event(stream, event);
  }
  Result<BlockId> block_stream(void* stream) override { return device_->block_stream(stream); }
  void unblock(BlockId block) override { device_->unblock(block); }
  Status unblock_behind(uint32_t lane, BlockId block) override {
    return device_->unblock_behind(lane, block);
  }
  Result<void*> lane_stream(uint32_t lane) override {
    if (capturing_) return static_cast<void*>(stream_);
    return device_->lane_stream(lane);
  }
  uint64_t busy_ns() const override { return 0; }

 private:
  static constexpr uint64_t kCountBytes = 8;
  static constexpr EventId kAtOnce = UINT64_MAX;  // the event while capturing
  enum Count : uint8_t { kBegun, kEnded };

  CudaGraphCapture(std::shared_ptr<CudaDevice> device, cudaStream_t stream);
  uint32_t count(Count which) const;
  Status count_up(Count which);

  const std::shared_ptr<CudaDevice> device_;
  const cudaStream_t stream_;
  DeviceCaps caps_;
  bool capturing_ = true;
  uint32_t* counts_ = nullptr;
};

}  // namespace sotto
