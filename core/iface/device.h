// A device: memory, queues (lanes), events, copies and the kernel table. The CPU device (core/cpu)
// executes at once; a GPU or the delayed test device executes later, in order within a lane.
//
// Threads: everything but alloc/free is called by the thread that drives the engine, one at a time.
#pragma once

#include <cstdint>
#include <span>

#include "core/base/status.h"
#include "core/iface/kernels.h"

namespace sotto {

enum class DeviceType : int32_t { kCpu = 1 };  // DLPack's numbers

struct DeviceId {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;
  bool operator==(const DeviceId&) const = default;
};

struct DeviceCaps {
  DeviceId id;
  // launch and copy have executed when they return: events are not needed.
  bool synchronous = true;
  // The host may read and write the device's memory, so transports can send from it without
  // staging.
  bool host_memory = true;
  // Lanes 0 .. lanes - 1 exist. Steps of one lane execute in the order of their launch.
  uint32_t lanes = 1;
  // Elements after which one kernel should be cut, so that sockets are served in between; 0: never
  // cut. A multiple of kNormBlock.
  uint64_t split_elements = 0;
  // The engine passes the byte ranges that a call writes and does not read (LaunchInfo::fresh).
  bool wants_fresh = false;
};

// Memory that a call overwrites without reading it.
struct FreshRange {
  void* data;
  uint64_t bytes;
};

// A point in a lane. Value 0 is no event.
using EventId = uint64_t;

class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceCaps& caps() const = 0;

  // Memory aligned to 128 bytes at least, zeroed. free(nullptr) does nothing. Threads: any.
  virtual Result<void*> alloc(uint64_t bytes) = 0;
  virtual void free(void* memory, uint64_t bytes) = 0;

  // Queues a kernel or a copy on a lane. Copies are within the device, or between it and host
  // memory; a copy takes a predicate as kernels do (null: always). An error means that nothing was
  // queued.
  virtual Status launch(uint32_t lane, const KernelCall& call,
                        std::span<const FreshRange> fresh) = 0;
  virtual Status copy(uint32_t lane, void* dst, const void* src, uint64_t bytes,
                      const uint32_t* predicate, uint32_t expect) = 0;

  // record: an event that is done when everything queued on the lane so far has executed. wait:
  // later work of the lane starts after the event. query: whether it is done; an execution error of
  // the work before it is returned once. The event is given back with release, which is legal
  // before it is done. Synchronous devices are never asked.
  virtual Result<EventId> record(uint32_t lane) = 0;
  virtual Status wait(uint32_t lane, EventId event) = 0;
  virtual Result<bool> query(EventId event) = 0;
  virtual void release(EventId event) = 0;

  // The caller's stream, as passed through the C ABI: later work of the lane starts after what is
  // queued on it; and the other way round. Devices without streams refuse.
  virtual Status lane_after_stream(uint32_t lane, void* stream) = 0;
  virtual Status stream_after_event(void* stream, EventId event) = 0;

  // Nanoseconds spent in kernels and copies so far (of this device object, all lanes).
  virtual uint64_t busy_ns() const = 0;
};

}  // namespace sotto
