// A device that behaves like a GPU and computes like the CPU device: kernels and copies execute
// later, on one thread per lane, after random delays; only events order the lanes. It shows what a
// synchronous device hides: a missing event wait, a result that is read before it is there, memory
// that goes away too early.
//
//  - Memory that a call overwrites (the `discarded` ranges of a launch; a copy's destination) is
//    filled with 0xff bytes (NaN for every float type) until the call really executes: from the
//    launch on if the device is idle, else from the moment at which everything that the lane waits
//    for is done. Filling earlier would disturb work that is queued before.
//  - Predicates are read when the call executes. A call whose predicate may not hold is filled only
//    where it holds.
//  - host_memory = false: what alloc returns cannot be touched by the host at all (SIGSEGV);
//    kernels and copies go through a second mapping. Tests read and write it with host_view.
//  - A call that does not keep to its kernel's description (core/kernels) ends the process: an
//    operand is absent that may not be, or one is written that is read.
//  - Operands are copied at launch. Tables, argument structs, lists of tensor pointers and memory
//    have to live until the call has executed. Tables that are destroyed before, and launches that
//    do not fit theirs, end the process, as does a list in memory that such a device cannot read.
//
// Threads: as Device; hold, resume, the counters and host_view from any thread.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "core/iface/device.h"

namespace sotto::test {

struct AsyncDeviceOptions {
  uint64_t seed = 1;
  uint32_t lanes = 2;
  bool background_lanes = false;
  uint32_t message_lanes = 0;
  bool host_memory = true;
  bool wants_discarded = true;
  uint64_t split_elements = 0;
  // Before each call, drawn evenly from 0 ..; one in eight waits up to four times that.
  int64_t max_delay_us = 100;
};

class AsyncDevice final : public Device {
 public:
  explicit AsyncDevice(const AsyncDeviceOptions& options);
  // Executes what is queued (held lanes are let go).
  ~AsyncDevice() override;

  const DeviceCaps& caps() const override { return caps_; }
  Result<void*> alloc(uint64_t bytes) override;
  void free(void* memory, uint64_t bytes) override;
  Result<std::shared_ptr<const CallTables>> prepare(std::span<const KernelCall> calls) override;
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
  uint64_t busy_ns() const override;

  // ---- For tests ----

  // The calls of a lane that have not begun stay queued until resume.
  void hold(uint32_t lane);
  void resume(uint32_t lane);
  // Everything queued has executed.
  void drain();
  // A host address for device memory (the same address where host_memory is true).
  void* host_view(const void* memory) const;

  // Faults. Calls of a kind count from 0 when the device is made. kLaunch, kCopy, kRecord: the call
  // returns DEVICE and nothing is queued. kWait: the wait is ignored, as if the caller had
  // forgotten it. kExecute: the call is not executed, and the next query of an event behind it
  // returns DEVICE.
  enum class Fault : uint8_t { kLaunch, kCopy, kRecord, kWait, kExecute };
  void inject(Fault fault, uint64_t which);
  // How many calls of the kind there were; so a test can go through all of them.
  uint64_t calls(Fault fault) const;
  // How many calls a lane has executed, waits for events among them.
  uint64_t executed(uint32_t lane) const;
  // Events that were recorded and not released, tables that were not destroyed, bytes that were
  // allocated and not freed.
  uint64_t live_events() const;
  uint64_t live_tables() const { return live_tables_->load(); }
  uint64_t live_bytes() const;

 private:
  struct Item;
  class Tables;
  struct Lane {
    std::thread thread;
    std::unique_ptr<Device> cpu;  // only this thread uses it
    std::mt19937_64 random;
    std::deque<std::unique_ptr<Item>> queue;
    std::condition_variable changed;
    uint64_t queued = 0;    // items ever
    uint64_t executed = 0;  // items ever
    bool held = false;
    Status error;  // of an execution, not yet reported
    uint64_t error_at = 0;
  };
  struct Event {
    uint32_t lane;
    uint64_t position;  // done when the lane has executed that many
  };
  struct Block {
    uint64_t bytes = 0;
    std::byte* alias = nullptr;  // where lanes and tests reach it; null: at its own address
  };

  bool count_fault(Fault fault);  // with mutex_ held; true: this call fails
  Status enqueue(uint32_t lane, std::unique_ptr<Item> item);
  void lane_main(uint32_t index) noexcept;
  void run(Lane& lane, Item& item);
  static void run_kernel(Lane& lane, const KernelCall& call);
  void poison(const Item& item) const;
  bool idle() const;                      // with mutex_ held
  void* reach(const void* memory) const;  // with memory_mutex_ held
  using Blocks = std::map<const std::byte*, Block>;
  Blocks::const_iterator find_block(const void* memory) const;  // the same; end(): none

  DeviceCaps caps_;
  const int64_t max_delay_us_;
  mutable std::mutex mutex_;
  std::condition_variable executed_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::map<EventId, Event> events_;
  EventId next_event_ = 1;
  std::array<uint64_t, 5> calls_{};
  std::array<std::vector<uint64_t>, 5> faults_;
  bool stop_ = false;
  std::shared_ptr<std::atomic<uint64_t>> live_tables_ = std::make_shared<std::atomic<uint64_t>>();
  mutable std::mutex memory_mutex_;
  Blocks blocks_;
};

}  // namespace sotto::test
