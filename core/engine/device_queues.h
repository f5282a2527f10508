// What has been issued to devices and is not known to be done: lanes, events, and the user's
// streams before and behind operations.
//
// Between lanes of an asynchronous device an event is recorded and waited for where an edge of the
// plan crosses. A wait that another one implies is left out: every lane has a clock of what its
// next call comes after, and an event carries the clock of its lane. Driver.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/small_vector.h"
#include "core/base/status.h"
#include "core/engine/scheduler.h"
#include "core/iface/device.h"

namespace sotto {

// How much of every lane comes before something: positions count what was ever issued to a lane.
using LaneClock = std::array<uint64_t, kMaxLanes>;

// An event behind a step, and what was before it; of an input, each lane's first call behind it.
struct StepEvent {
  EventId id = 0;
  LaneClock before{};
  bool ordered = false;     // the user's stream too
  uint32_t awaited_by = 0;  // of an input: bit k: lane k waits, from before[k] on
};

struct DeviceQueue;

// The part of an operation that its device works for.
class QueuedOp : public ScheduledOp {
 public:
  // Of the plan's device; null before it is admitted.
  const DeviceQueue* queue() const { return queue_; }
  // Its steps come after a stream of the user.
  bool has_stream() const { return after_ != 0 && asynchronous(); }
  // Where a step runs. Once the operation is admitted.
  uint32_t lane(const Step& step) const {
    return step.lane < shared_lanes_ ? first_lane_ + step.lane : step.lane;
  }

 private:
  friend class DeviceQueues;

  DeviceQueue* queue_ = nullptr;
  uint32_t first_lane_ = 0;                   // of background work: the first lane for it
  uint32_t shared_lanes_ = 0;                 // DeviceCaps::lanes: others are as steps say
  std::vector<StepEvent>* events_ = nullptr;  // per step
  EventId after_ = 0;
  uint32_t ordered_lanes_ = 0;          // bit k: what lane k gets now comes after after_
  std::vector<BlockId> stream_blocks_;  // streams that are blocked until the operation is done
};

// One device.
struct DeviceQueue {
  struct InFlight {
    QueuedOp* op;
    uint32_t step;  // kNoStep: the operation's undo kernels
    EventId event;  // 0: a later one's tells
  };
  struct Lane {
    std::deque<InFlight> in_flight;
    LaneClock after{};  // what the next call of the lane comes after; of the lane itself: all of it
  };
  explicit DeviceQueue(std::shared_ptr<Device> d)
      : device(std::move(d)),
        asynchronous(!device->caps().synchronous),
        lanes(device->caps().all_lanes()) {}
  std::shared_ptr<Device> device;
  bool asynchronous;
  std::vector<Lane> lanes;
  std::vector<InFlight> inputs;  // await steps whose events are not done, in no order
};

class DeviceQueues {
 public:
  // The operation will be issued to the device. `events` (as many as steps, if the device is
  // asynchronous) lives as long as it is in flight. `after`: what its steps come after; 0: nothing.
  void admit(QueuedOp& op, const std::shared_ptr<Device>& device, std::vector<StepEvent>& events,
             EventId after);

  // ---- Calls of lanes, asynchronous devices ----

  // The step's lane waits for predecessors that were issued to other lanes, unless it comes after
  // them already; and for the user's stream, before it touches user memory, unless what it comes
  // after did so.
  Status order(QueuedOp& op, uint32_t step);
  // The step was issued. An error: nothing may follow it, since its event could not be recorded.
  Status issued(QueuedOp& op, uint32_t step);
  // An input is there behind the event, which is the queues' from now on.
  void arrives(QueuedOp& op, uint32_t step, EventId event);
  // It is of no interest any more when the operation's inputs are there.
  void drop_inputs(QueuedOp& op);
  // The operation's undo kernels were issued, to its first lane.
  Status undo_issued(QueuedOp& op);
  // A step without an event of its own is seen to be done by the event of a later one, which a
  // failed operation may never issue: the last calls of its device's lanes get one.
  void mark(QueuedOp& op);
  // Calls ended(operation, step, status of the device) for each call that has ended, in the order
  // of its lane. True if there was one.
  template <class Ended>
  bool poll(Ended&& ended) {
    bool any = false;
    for (size_t q = 0; q < queues_.size(); ++q) {
      if (!queues_[q]->asynchronous) continue;
      for (DeviceQueue::Lane& lane : queues_[q]->lanes) {
        while (advance(*queues_[q]->device, lane, ended)) any = true;
      }
      any |= take_inputs(*queues_[q], ended);
    }
    return any;
  }
  // Work is queued on a device, or a stream is awaited.
  bool busy() const;

  // ---- Streams of the user ----

  // Steps that touch user memory enter the lanes when the stream has reached the operation.
  void block(QueuedOp& op);
  // Calls reached(operation, status) for each for which it has.
  template <class Reached>
  bool poll_streams(Reached&& reached) {
    bool any = false;
    for (size_t i = 0; i < blocked_.size();) {
      QueuedOp& op = *blocked_[i];
      const Result<bool> came = op.queue_->device->query(op.after_);
      if (came.ok() && !*came) {
        ++i;
        continue;
      }
      any = true;
      op.ordered_lanes_ = ~0u;
      drop_blocked(op);
      reached(op, came.ok() ? ok_status() : came.status());
    }
    return any;
  }
  // It does not wait for its stream any more.
  void drop_blocked(QueuedOp& op) { std::erase(blocked_, &op); }
  // Blocks a stream of the operation's device: what is queued on it later starts after
  // unblock_streams. Also before the operation is admitted.
  static Status block_stream(QueuedOp& op, Device& device, void* stream);
  static void unblock_streams(QueuedOp& op, Device& device);
  // If nothing is left of the operation but its calls: the stream starts after them; and streams
  // that it blocks do, without the host, if the device can.
  static Status order_stream(QueuedOp& op, void* stream);
  static void unblock_behind(QueuedOp& op);

 private:
  // Ends the steps up to the first event of a lane, if that is done.
  template <class Ended>
  bool advance(Device& device, DeviceQueue::Lane& lane, Ended&& ended) {
    std::deque<DeviceQueue::InFlight>& calls = lane.in_flight;
    const auto marked =
        std::find_if(calls.begin(), calls.end(), [](const auto& f) { return f.event != 0; });
    if (marked == calls.end()) return false;
    const Result<bool> ready = device.query(marked->event);
    if (ready.ok() && !*ready) return false;
    const auto count = marked - calls.begin() + 1;
    for (std::ptrdiff_t i = 0; i < count; ++i) {
      const DeviceQueue::InFlight f = calls.front();
      calls.pop_front();
      if (f.event != 0) device.release(f.event);
      if (f.step != kNoStep) --f.op->steps().in_flight;
      ended(*f.op, f.step, ready.ok() ? ok_status() : ready.status());
    }
    return true;
  }

  // The lanes with calls of the operation that touch user memory, but for those that another one of
  // them comes after.
  static SmallVector<uint32_t, kMaxLanes> user_lanes(const QueuedOp& op);

  template <class Ended>
  bool take_inputs(DeviceQueue& queue, Ended&& ended) {
    bool any = false;
    for (size_t i = 0; i < queue.inputs.size();) {
      const DeviceQueue::InFlight f = queue.inputs[i];
      const Result<bool> there = queue.device->query(f.event);
      if (there.ok() && !*there) {
        ++i;
        continue;
      }
      queue.inputs.erase(queue.inputs.begin() + static_cast<std::ptrdiff_t>(i));
      queue.device->release(f.event);
      --f.op->steps().in_flight;
      ended(*f.op, f.step, there.ok() ? ok_status() : there.status());
      any = true;
    }
    return any;
  }

  std::vector<std::unique_ptr<DeviceQueue>> queues_;
  std::vector<QueuedOp*> blocked_;
};

}  // namespace sotto
