// The CPU device, with the processor time of every kernel.
#pragma once

#include <array>
#include <atomic>

#include "core/cpu/cpu_device.h"

namespace sotto::perf {

// One thread, so that the time of the calling thread is the time of a kernel, whatever else uses
// the processor meanwhile.
class TimedDevice final : public Device {
 public:
  explicit TimedDevice(SimdLevel limit) : device_(1, limit) {}

  // Nanoseconds of processor time in kernels of this kind so far. Threads: any.
  uint64_t cpu_ns(KernelId id) const { return of(id).load(std::memory_order_relaxed); }

  const DeviceCaps& caps() const override { return device_.caps(); }
  Result<void*> alloc(uint64_t bytes) override { return device_.alloc(bytes); }
  void free(void* memory, uint64_t bytes) override { device_.free(memory, bytes); }
  Status launch(uint32_t lane, const KernelCall& call,
                std::span<const DiscardedRange> discarded) override;
  Status copy(uint32_t lane, void* dst, const void* src, uint64_t bytes, const uint32_t* predicate,
              uint32_t expect) override {
    return device_.copy(lane, dst, src, bytes, predicate, expect);
  }
  Result<EventId> record(uint32_t lane) override { return device_.record(lane); }
  Status wait(uint32_t lane, EventId event) override { return device_.wait(lane, event); }
  Result<bool> query(EventId event) override { return device_.query(event); }
  void release(EventId event) override { device_.release(event); }
  Result<EventId> record_stream(void* stream) override { return device_.record_stream(stream); }
  Status stream_after_event(void* stream, EventId event) override {
    return device_.stream_after_event(stream, event);
  }
  Result<BlockId> block_stream(void* stream) override { return device_.block_stream(stream); }
  void unblock(BlockId block) override { device_.unblock(block); }
  Status unblock_behind(uint32_t lane, BlockId block) override {
    return device_.unblock_behind(lane, block);
  }
  uint64_t busy_ns() const override { return device_.busy_ns(); }

 private:
  using Times = std::array<std::atomic<uint64_t>, static_cast<size_t>(KernelId::kCount)>;
  const std::atomic<uint64_t>& of(KernelId id) const { return times_[static_cast<size_t>(id)]; }

  CpuDevice device_;
  Times times_{};
};

}  // namespace sotto::perf
