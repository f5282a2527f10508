// The CPU as a device: host memory, kernels and copies executed at once by the calling thread and a
// pool.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/cpu/kernel_table.h"
#include "core/cpu/thread_pool.h"
#include "core/iface/device.h"

namespace sotto {

// Upper limit of the vector instructions in use. All levels give the same bits.
enum class SimdLevel : uint8_t { kAuto, kScalar, kSse4, kAvx2, kAvx512 };

// "auto", "scalar", "sse4", "avx2" or "avx512" (the values of SOTTO_SIMD); an error names the word
// and the allowed ones.
Result<SimdLevel> simd_level_from_name(std::string_view name);
// What runs on this processor under a limit: the highest level at or below it that processor and
// build have, never kAuto.
SimdLevel simd_level_in_use(SimdLevel limit);
// Its word, for reports.
std::string simd_in_use(SimdLevel limit);
// Words of all levels that run on this processor, ascending: "scalar", ... .
std::vector<std::string> simd_levels_available();
// Kernels of a level that simd_level_in_use returned.
const KernelTable& kernels_of(SimdLevel level);

class CpuDevice : public Device {
 public:
  // threads >= 1. Threads of the pool are created at the first large kernel.
  CpuDevice(uint32_t threads, SimdLevel limit);

  const DeviceCaps& caps() const override { return caps_; }
  Result<void*> alloc(uint64_t bytes) override;
  void free(void* memory, uint64_t bytes) override;
  Status launch(uint32_t lane, const KernelCall& call,
                std::span<const DiscardedRange> discarded) override;
  Status copy(uint32_t lane, void* dst, const void* src, uint64_t bytes, const uint32_t* predicate,
              uint32_t expect) override;
  Result<EventId> record(uint32_t lane) override;
  Status wait(uint32_t lane, EventId event) override;
  Result<bool> query(EventId event) override;
  void release(EventId event) override;
  Result<EventId> record_stream(void* stream) override;
  Status stream_after_event(void* stream, EventId event) override;
  Result<BlockId> block_stream(void* stream) override;
  void unblock(BlockId block) override;
  uint64_t busy_ns() const override { return busy_ns_.load(std::memory_order_relaxed); }

 private:
  void run_shares(KernelFunction kernel, const KernelCall& call);

  DeviceCaps caps_;
  const KernelTable* kernels_;
  const uint32_t threads_;
  ThreadPool pool_;
  std::vector<std::vector<Piece>> shares_;  // one table per thread, reused
  std::atomic<uint64_t> busy_ns_ = 0;
};

// threads: 1 .. 4096.
Result<std::unique_ptr<Device>> make_cpu_device(unsigned threads, SimdLevel limit);

}  // namespace sotto
