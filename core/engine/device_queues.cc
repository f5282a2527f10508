#include "core/engine/device_queues.h"

#include "core/base/log.h"

namespace sotto {

void DeviceQueues::admit(QueuedOp& op, const std::shared_ptr<Device>& device,
                         std::vector<StepEvent>& events, EventId after) {
  op.events_ = &events;
  op.after_ = after;
  const DeviceCaps& caps = device->caps();
  op.shared_lanes_ = caps.lanes;
  op.first_lane_ = caps.background_lanes && in_background(op.priority()) ? caps.lanes : 0;
  for (const auto& queue : queues_) {
    if (queue->device == device) op.queue_ = queue.get();
  }
  if (op.queue_ != nullptr) return;
  // Graph captures live as long as their operations. One that has no other owner has nothing in
  // flight.
  std::erase_if(queues_, [](const auto& queue) { return queue->device.use_count() == 1; });
  op.queue_ = queues_.emplace_back(std::make_unique<DeviceQueue>(device)).get();
}

Status DeviceQueues::order(QueuedOp& op, uint32_t step) {
  const Plan& plan = op.plan();
  const Step& s = plan.steps[step];
  Device& device = *op.queue_->device;
  const uint32_t lane = op.lane(s);
  LaneClock& after = op.queue_->lanes[lane].after;
  const uint32_t bit = 1u << lane;
  // The latest predecessor of each lane.
  std::array<const StepEvent*, kMaxLanes> latest{};
  SmallVector<StepEvent*> inputs;
  for (uint32_t p : plan.order.preds(step)) {
    const Step& before = plan.steps[p];
    if (!on_lane(plan, before)) continue;
    StepEvent& event = (*op.events_)[p];
    if (before.await() != nullptr) {
      // Other steps need what the host knows of it: where it is.
      if (s.user && event.id != 0 && op.steps().progress[p] != StepProgress::kDone)
        inputs.push_back(&event);
      continue;
    }
    if (event.ordered) op.ordered_lanes_ |= bit;
    const uint32_t from = op.lane(before);
    if (from == lane || op.steps().progress[p] == StepProgress::kDone ||
        after[from] >= event.before[from])
      continue;
    const StepEvent*& known = latest[from];
    if (known == nullptr || known->before[from] < event.before[from]) known = &event;
  }
  for (size_t from = 0; from < latest.size(); ++from) {
    const StepEvent* event = latest[from];
    // Or one that comes after it.
    const auto covers = [&](const StepEvent* other) {
      return other != nullptr && other != event && other->before[from] >= event->before[from];
    };
    if (event == nullptr || std::any_of(latest.begin(), latest.end(), covers)) continue;
    SOTTO_TRY(device.wait(lane, event->id));
    for (size_t k = 0; k < after.size(); ++k) after[k] = std::max(after[k], event->before[k]);
  }
  for (StepEvent* input : inputs) {
    bool comes_after = (input->awaited_by & bit) != 0;
    for (uint32_t k = 0; k < after.size(); ++k)
      comes_after |= (input->awaited_by >> k & 1) != 0 && after[k] >= input->before[k];
    if (comes_after) continue;
    SOTTO_TRY(device.wait(lane, input->id));
    input->awaited_by |= bit;
    input->before[lane] = after[lane] + 1;
  }
  if (op.after_ == 0 || !s.user || (op.ordered_lanes_ & bit) != 0) return ok_status();
  op.ordered_lanes_ |= bit;
  return device.wait(lane, op.after_);
}

Status DeviceQueues::issued(QueuedOp& op, uint32_t step) {
  const uint32_t index = op.lane(op.plan().steps[step]);
  DeviceQueue::Lane& lane = op.queue_->lanes[index];
  ++lane.after[index];
  ++op.steps().in_flight;
  lane.in_flight.push_back({&op, step, 0});
  if (!op.plan().order.needs_event[step]) return ok_status();
  SOTTO_ASSIGN(const EventId event, op.queue_->device->record(index));
  lane.in_flight.back().event = event;
  (*op.events_)[step] = {event, lane.after, (op.ordered_lanes_ >> index & 1) != 0};
  return ok_status();
}

void DeviceQueues::arrives(QueuedOp& op, uint32_t step, EventId event) {
  (*op.events_)[step] = {event};
  ++op.steps().in_flight;
  op.queue_->inputs.push_back({&op, step, event});
}

void DeviceQueues::drop_inputs(QueuedOp& op) {
  if (op.queue_ == nullptr) return;
  std::erase_if(op.queue_->inputs, [&](const DeviceQueue::InFlight& f) {
    if (f.op != &op) return false;
    op.queue_->device->release(f.event);
    --op.steps().in_flight;
    return true;
  });
}

Status DeviceQueues::undo_issued(QueuedOp& op) {
  SOTTO_ASSIGN(const EventId event, op.queue_->device->record(op.first_lane_));
  op.queue_->lanes[op.first_lane_].in_flight.push_back({&op, kNoStep, event});
  return ok_status();
}

void DeviceQueues::mark(QueuedOp& op) {
  if (op.queue_ == nullptr) return;
  DeviceQueue& queue = *op.queue_;
  if (!queue.asynchronous) return;
  for (uint32_t i = 0; i < queue.lanes.size(); ++i) {
    std::deque<DeviceQueue::InFlight>& lane = queue.lanes[i].in_flight;
    if (lane.empty() || lane.back().event != 0) continue;
    const Result<EventId> event = queue.device->record(i);
    if (event.ok()) {
      lane.back().event = *event;
      continue;
    }
    log(LogLevel::kError, "the device cannot be waited for: {}", event.status().text());
    for (; !lane.empty() && lane.back().event == 0; lane.pop_back()) {
      if (lane.back().step != kNoStep) --lane.back().op->steps().in_flight;
    }
  }
}

bool DeviceQueues::busy() const {
  if (!blocked_.empty()) return true;
  for (const auto& queue : queues_) {
    if (!queue->inputs.empty()) return true;
    for (const DeviceQueue::Lane& lane : queue->lanes) {
      if (!lane.in_flight.empty()) return true;
    }
  }
  return false;
}

void DeviceQueues::block(QueuedOp& op) {
  Scheduler::block(op);
  blocked_.push_back(&op);
}

Status DeviceQueues::block_stream(QueuedOp& op, Device& device, void* stream) {
  SOTTO_ASSIGN(const BlockId block, device.block_stream(stream));
  op.stream_blocks_.push_back(block);
  return ok_status();
}

void DeviceQueues::unblock_streams(QueuedOp& op, Device& device) {
  for (const BlockId block : std::exchange(op.stream_blocks_, {})) device.unblock(block);
}

SmallVector<uint32_t, kMaxLanes> DeviceQueues::user_lanes(const QueuedOp& op) {
  const auto touches_user_memory = [&](const DeviceQueue::InFlight& f) {
    return f.op == &op && (f.step == kNoStep || op.plan().steps[f.step].user);
  };
  const std::vector<DeviceQueue::Lane>& all = op.queue_->lanes;
  SmallVector<uint32_t, kMaxLanes> lanes;
  for (uint32_t i = 0; i < all.size(); ++i) {
    if (std::ranges::any_of(all[i].in_flight, touches_user_memory)) lanes.push_back(i);
  }
  SmallVector<uint32_t, kMaxLanes> last;
  for (const uint32_t lane : lanes) {
    const auto comes_after = [&](uint32_t other) {
      return other != lane && all[other].after[lane] >= all[lane].after[lane];
    };
    if (std::ranges::none_of(lanes, comes_after)) last.push_back(lane);
  }
  return last;
}

Status DeviceQueues::order_stream(QueuedOp& op, void* stream) {
  Device& device = *op.queue_->device;
  for (const uint32_t lane : user_lanes(op)) {
    SOTTO_ASSIGN(const EventId event, device.record(lane));
    const Status status = device.stream_after_event(stream, event);
    device.release(event);
    SOTTO_TRY(status);
  }
  return ok_status();
}

void DeviceQueues::unblock_behind(QueuedOp& op) {
  Device& device = *op.queue_->device;
  const SmallVector<uint32_t, kMaxLanes> lanes = user_lanes(op);
  if (lanes.empty()) return unblock_streams(op, device);
  const uint32_t last = lanes.back();
  for (const uint32_t lane : lanes) {
    if (lane == last) continue;
    const Result<EventId> event = device.record(lane);
    if (!event.ok()) return;
    const Status behind = device.wait(last, *event);
    device.release(*event);
    if (!behind.ok()) return;
  }
  std::erase_if(op.stream_blocks_,
                [&](BlockId block) { return device.unblock_behind(last, block).ok(); });
}

}  // namespace sotto
