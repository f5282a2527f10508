// A device: memory, queues (lanes), events, copies and the kernel table. The CPU device (core/cpu)
// executes at once; a GPU or the delayed test device executes later, in order within a lane.
//
// Threads: one at a time, the one that drives the engine, unless a function says "any".
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/base/status.h"
#include "core/kernels/call.h"

namespace sotto {

enum class DeviceType : int32_t { kCpu = 1, kCuda = 2 };  // DLPack's numbers

struct DeviceId {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;
  auto operator<=>(const DeviceId&) const = default;
};
std::string device_name(const DeviceId& id);  // "cpu", "cuda:0"

inline constexpr uint32_t kMaxLanes = 16;  // with those for background work and messages

struct DeviceCaps {
  DeviceId id;
  // launch and copy have executed when they return: events are not needed.
  bool synchronous = true;
  // The host may read and write the device's memory, and kernels the host's. Otherwise transports
  // send from host memory that the device copies to, and lists of tensor pointers are copied to the
  // device before kernels read them.
  bool host_memory = true;
  // Lanes 0 .. lanes - 1 exist. Steps of one lane execute in the order of their launch.
  uint32_t lanes = 1;
  // As many lanes follow, lanes .. 2 * lanes - 1, on which operations in the background run, at a
  // lower priority if the device has any.
  bool background_lanes = false;
  // So many more follow, at a high priority, for messages that are calls of lanes: root comms take
  // turns, so that none waits behind another's. 0: they are in lane 1, if there is one.
  uint32_t message_lanes = 0;
  // Elements after which one kernel should be cut, so that sockets are served in between; 0: never
  // cut. A multiple of kNormBlock.
  uint64_t split_elements = 0;
  // There are streams of the caller, which operations come after.
  bool streams = false;
  // The engine passes the byte ranges that a call writes and does not read (`discarded` of launch).
  bool wants_discarded = false;
  // Calls do not execute, but become part of a graph (GraphCapture).
  bool captures = false;

  uint32_t first_message_lane() const { return lanes * (background_lanes ? 2 : 1); }
  uint32_t all_lanes() const { return first_message_lane() + message_lanes; }
  // `channel`: number of the root comm, of those of the context.
  uint32_t message_lane(uint32_t channel) const {
    if (message_lanes == 0) return lanes > 1 ? 1 : 0;
    return first_message_lane() + channel % message_lanes;
  }
};

// Memory that a call overwrites without reading it.
struct DiscardedRange {
  void* data;
  uint64_t bytes;
};

// A point in a lane or a stream. Value 0 is no event.
using EventId = uint64_t;

// A block on a stream, until unblock. Value 0 is none.
using BlockId = uint64_t;

// The constant parts of kernel calls (pieces, and arguments with the arrays that they lead to) in
// the form in which a device reads them. Nothing that was launched with them may be in flight when
// they are destroyed.
class CallTables {
 public:
  virtual ~CallTables() = default;
};

class GraphCapture;

class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceCaps& caps() const = 0;

  // Memory aligned to 128 bytes at least, zeroed. free(nullptr) does nothing. Threads: any.
  virtual Result<void*> alloc(uint64_t bytes) = 0;
  virtual void free(void* memory, uint64_t bytes) = 0;

  // Host memory that copies of this device reach at full speed and without holding up the caller
  // (pinned), aligned to 128 bytes at least, zeroed. Threads: any.
  virtual Result<void*> alloc_host(uint64_t bytes);
  virtual void free_host(void* memory, uint64_t bytes);

  // Tables of calls that will be launched many times: KernelCall::tables and KernelCall::call then
  // name them. Only the constant parts are looked at, and which operands are null. May wait for the
  // device. Null: the device reads pieces and arguments where they are. Threads: any.
  virtual Result<std::shared_ptr<const CallTables>> prepare(std::span<const KernelCall> calls);

  // Queues a kernel or a copy on a lane. Copies are within the device, or between it and host
  // memory; a copy takes a predicate as kernels do (null: always). An error means that nothing was
  // queued.
  virtual Status launch(uint32_t lane, const KernelCall& call,
                        std::span<const DiscardedRange> discarded) = 0;
  virtual Status copy(uint32_t lane, void* dst, const void* src, uint64_t bytes,
                      const uint32_t* predicate, uint32_t expect) = 0;

  // record: an event that is done when everything queued on the lane so far has executed. wait:
  // later work of the lane starts after the event. query: whether it is done; an execution error of
  // the work before it is returned once. The event is given back with release, which any thread may
  // call before it is done. Synchronous devices are never asked.
  virtual Result<EventId> record(uint32_t lane) = 0;
  virtual Status wait(uint32_t lane, EventId event) = 0;
  virtual Result<bool> query(EventId event) = 0;
  virtual void release(EventId event) = 0;

  // Streams of the caller, as passed through the C ABI. Devices without streams refuse.
  // INVALID_STATE if work for the stream would not run but be captured (a CUDA graph). Asked before
  // what follows. Threads: any.
  virtual Status check_stream(void* stream) const {
    (void)stream;
    return ok_status();
  }
  // What puts calls into the graph that the stream is being captured into; null: it is not.
  // Threads: any.
  virtual Result<std::shared_ptr<GraphCapture>> capture_graph(void* stream);
  // An event behind what is queued on the stream now. Threads: any.
  virtual Result<EventId> record_stream(void* stream) = 0;
  // What is queued on the stream later starts after the event. Threads: any.
  virtual Status stream_after_event(void* stream, EventId event) = 0;
  // Blocks the stream: what is queued on it later starts when unblock unblocks it, or when what is
  // queued on the lane of unblock_behind has executed. Both end the block; an error of the second
  // leaves it. The host does not wait.
  virtual Result<BlockId> block_stream(void* stream) = 0;
  virtual void unblock(BlockId block) = 0;
  virtual Status unblock_behind(uint32_t lane, BlockId block);

  // A lane as the device's own library knows it (cuda: a cudaStream_t), for transports that queue
  // there too; null: there is no such thing.
  virtual Result<void*> lane_stream(uint32_t lane) {
    (void)lane;
    return nullptr;
  }

  // Nanoseconds spent in kernels and copies so far (of this device object, all lanes). 0 on a
  // device that would have to be slowed down to tell.
  virtual uint64_t busy_ns() const = 0;
};

// Makes calls part of the graph that a stream of the caller is being captured into, one after the
// other, and knows how far launches of the graph are. A device of one lane: that stream, and after
// finish() the first lane of the device whose stream it is. Events during the capture are
// done at once.
class GraphCapture : public Device {
 public:
  // Nothing more becomes part of the graph.
  virtual Status finish() = 0;
  // Launches that have begun, and that have ended. What one has written is there when it has ended;
  // what the host has written before it looks at begun() is read by all that have not. Threads:
  // any.
  virtual uint32_t begun() const = 0;
  virtual uint32_t ended() const = 0;
  // An execution error of the device.
  virtual Status health() = 0;
};

}  // namespace sotto
