// Which waits between lanes are made and which are left out because another implies them, which
// calls have ended when an event is done, and what becomes of streams of the caller: on a device
// that only writes down what it is asked.
#include "core/engine/device_queues.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace sotto::test {
namespace {

class NotingDevice final : public Device {
 public:
  NotingDevice() {
    caps_.synchronous = false;
    caps_.lanes = 4;
    caps_.background_lanes = true;
    caps_.message_lanes = 2;
  }
  const DeviceCaps& caps() const override { return caps_; }
  Result<void*> alloc(uint64_t) override { return invalid_state("no memory here"); }
  void free(void*, uint64_t) override {}
  Status launch(uint32_t, const KernelCall&, std::span<const DiscardedRange>) override {
    return ok_status();
  }
  Status copy(uint32_t, void*, const void*, uint64_t, const uint32_t*, uint32_t) override {
    return ok_status();
  }
  Result<EventId> record(uint32_t lane) override {
    if (broken) return Status(Code::kDevice, "no events");
    recorded.push_back(lane);
    events.insert(++last);
    return last;
  }
  Status wait(uint32_t lane, EventId event) override {
    waits.emplace_back(lane, event);
    return ok_status();
  }
  Result<bool> query(EventId event) override {
    if (broken) return Status(Code::kDevice, "it broke");
    return ended.count(event) != 0;
  }
  void release(EventId event) override { events.erase(event); }
  Result<EventId> record_stream(void*) override { return ++last; }
  Status stream_after_event(void*, EventId event) override {
    stream_waits.push_back(event);
    return ok_status();
  }
  Result<BlockId> block_stream(void*) override { return ++held; }
  void unblock(BlockId) override { --held; }
  uint64_t busy_ns() const override { return 0; }

  using Waits = std::vector<std::pair<uint32_t, EventId>>;
  Waits waits;
  std::vector<uint32_t> recorded;  // lanes, in order
  std::vector<EventId> stream_waits;
  std::set<EventId> events;  // recorded and not given back
  std::set<EventId> ended;
  EventId last = 0;
  BlockId held = 0;
  bool broken = false;

 private:
  DeviceCaps caps_;
};
using Waits = NotingDevice::Waits;

struct LaneStep {
  uint16_t lane;
  std::vector<uint32_t> after = {};
  bool user = false;
  bool event = true;
};

// One operation of kernels on a device.
class LaneOp {
 public:
  LaneOp(DeviceQueues& queues, const std::shared_ptr<NotingDevice>& device,
         const std::vector<LaneStep>& steps, EventId after = 0, int32_t priority = 0)
      : queues_(queues), device_(device), events_(steps.size()) {
    plan_.order.pred_begin = {0};
    plan_.order.succ_begin.assign(steps.size() + 1, 0);
    for (const LaneStep& s : steps) {
      Step& step = plan_.steps.emplace_back();
      step.lane = s.lane;
      step.user = s.user;
      plan_.order.predecessors.insert(plan_.order.predecessors.end(), s.after.begin(),
                                      s.after.end());
      plan_.order.pred_begin.push_back(static_cast<uint32_t>(plan_.order.predecessors.size()));
      plan_.order.needs_event.push_back(s.event);
    }
    states_.reset(plan_);
    Scheduler::bind(op_, plan_, states_, priority, -1);
    queues.admit(op_, device, events_, after);
    Scheduler::set_running(op_, true, 0);
  }
  // The waits that issuing the step makes.
  Waits issue(uint32_t step) {
    device_->waits.clear();
    EXPECT_TRUE(queues_.order(op_, step).ok());
    Scheduler::issued(op_, step);
    EXPECT_TRUE(queues_.issued(op_, step).ok());
    return device_->waits;
  }
  EventId event(uint32_t step) const { return events_[step].id; }
  QueuedOp& op() { return op_; }
  StepStates& states() { return states_; }

 private:
  DeviceQueues& queues_;
  std::shared_ptr<NotingDevice> device_;
  std::vector<StepEvent> events_;
  Plan plan_;
  StepStates states_;
  QueuedOp op_;
};

class DeviceQueuesTest : public testing::Test {
 protected:
  // Steps that have ended, and whether the device was healthy.
  std::vector<std::pair<uint32_t, bool>> poll() {
    std::vector<std::pair<uint32_t, bool>> ended;
    queues_.poll([&](QueuedOp&, uint32_t step, const Status& status) {
      ended.emplace_back(step, status.ok());
    });
    return ended;
  }
  using Ended = std::vector<std::pair<uint32_t, bool>>;
  std::shared_ptr<NotingDevice> device_ = std::make_shared<NotingDevice>();
  DeviceQueues queues_;
};

TEST_F(DeviceQueuesTest, OneLaneNeedsNoWaits) {
  LaneOp op(queues_, device_, {{0}, {0, {0}}, {0, {0, 1}}});
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(op.issue(i), Waits{});
}

TEST_F(DeviceQueuesTest, AnotherLaneWaitsOnceForAnEvent) {
  LaneOp op(queues_, device_, {{0}, {1, {0}}, {1, {0}}});
  op.issue(0);
  EXPECT_EQ(op.issue(1), (Waits{{1, op.event(0)}}));
  EXPECT_EQ(op.issue(2), Waits{});  // the lane comes after it already
}

TEST_F(DeviceQueuesTest, TheLatestPredecessorOfALaneImpliesTheOthers) {
  LaneOp op(queues_, device_, {{0}, {0}, {1, {0, 1}}, {1, {0}}});
  op.issue(0);
  op.issue(1);
  EXPECT_EQ(op.issue(2), (Waits{{1, op.event(1)}}));
  EXPECT_EQ(op.issue(3), Waits{});
}

TEST_F(DeviceQueuesTest, AWaitThatAnotherLanesWaitImpliesIsLeftOut) {
  LaneOp op(queues_, device_, {{0}, {1, {0}}, {2, {0, 1}}, {3, {1}}, {3, {0}}});
  op.issue(0);
  op.issue(1);
  EXPECT_EQ(op.issue(2), (Waits{{2, op.event(1)}}));  // step 1 comes after step 0
  EXPECT_EQ(op.issue(3), (Waits{{3, op.event(1)}}));
  EXPECT_EQ(op.issue(4), Waits{});
}

TEST_F(DeviceQueuesTest, IndependentLanesAreBothWaitedFor) {
  LaneOp op(queues_, device_, {{0}, {1}, {2, {0, 1}}});
  op.issue(0);
  op.issue(1);
  EXPECT_EQ(op.issue(2), (Waits{{2, op.event(0)}, {2, op.event(1)}}));
}

TEST_F(DeviceQueuesTest, AWaitCoversWhatWasIssuedBeforeItsEventAlone) {
  LaneOp op(queues_, device_, {{0}, {1, {0}}, {0}, {1, {2}}});
  op.issue(0);
  EXPECT_EQ(op.issue(1), (Waits{{1, op.event(0)}}));
  op.issue(2);
  EXPECT_EQ(op.issue(3), (Waits{{1, op.event(2)}}));
}

TEST_F(DeviceQueuesTest, WhatIsDoneIsNotWaitedFor) {
  LaneOp op(queues_, device_, {{0}, {1, {0}}});
  op.issue(0);
  op.states().progress[0] = StepProgress::kDone;
  EXPECT_EQ(op.issue(1), Waits{});
}

TEST_F(DeviceQueuesTest, LaneClocksGoOnFromOperationToOperation) {
  LaneOp first(queues_, device_, {{0}, {1, {0}}}), second(queues_, device_, {{0}, {1, {0}}});
  first.issue(0);
  second.issue(0);
  EXPECT_EQ(second.issue(1), (Waits{{1, second.event(0)}}));
  EXPECT_EQ(first.issue(1), Waits{});  // an earlier event of the same lane
}

TEST_F(DeviceQueuesTest, BackgroundWorkHasLanesOfItsOwn) {
  LaneOp normal(queues_, device_, {{0}, {1, {0}}}, 0, kBackgroundPriority + 1);
  LaneOp background(queues_, device_, {{0, {}, true}, {1, {0}, true}, {0, {1}}}, 900,
                    kBackgroundPriority);
  normal.issue(0);
  EXPECT_EQ(background.issue(0), (Waits{{4, 900}}));
  EXPECT_EQ(background.issue(1), (Waits{{5, background.event(0)}}));
  EXPECT_EQ(background.issue(2), (Waits{{4, background.event(1)}}));
  EXPECT_EQ(normal.issue(1), (Waits{{1, normal.event(0)}}));
  ASSERT_TRUE(queues_.undo_issued(background.op()).ok());
  EXPECT_EQ(device_->recorded.back(), 4u);
  // What ends on lanes 4 and 5 ends whatever stands on 0 and 1.
  device_->ended = {background.event(0), background.event(1), background.event(2), device_->last};
  EXPECT_EQ(poll(), (Ended{{0, true}, {2, true}, {kNoStep, true}, {1, true}}));
  EXPECT_EQ(normal.states().in_flight, 2u);
  EXPECT_EQ(background.states().in_flight, 0u);
}

// A root comm has one lane for them, whatever its operations' priority.
TEST_F(DeviceQueuesTest, MessagesHaveALaneForEachRootComm) {
  const DeviceCaps& caps = device_->caps();
  EXPECT_EQ(caps.all_lanes(), 10u);
  EXPECT_EQ(caps.message_lane(0), 8u);
  EXPECT_EQ(caps.message_lane(1), 9u);
  EXPECT_EQ(caps.message_lane(2), 8u);
  LaneOp normal(queues_, device_, {{0}, {8, {0}}});
  LaneOp background(queues_, device_, {{0}, {8, {0}}, {9, {0}}}, 0, kBackgroundPriority);
  normal.issue(0);
  background.issue(0);
  EXPECT_EQ(normal.issue(1), (Waits{{8, normal.event(0)}}));
  EXPECT_EQ(background.issue(1), (Waits{{8, background.event(0)}}));
  EXPECT_EQ(background.issue(2), (Waits{{9, background.event(0)}}));
  device_->ended = {normal.event(0), normal.event(1), background.event(0), background.event(1),
                    background.event(2)};
  EXPECT_EQ(poll().size(), 5u);
}

constexpr EventId kStream = 1000;

TEST_F(DeviceQueuesTest, StepsOnTheCallersMemoryComeAfterTheStream) {
  LaneOp op(queues_, device_,
            {{0, {}, true}, {0, {}, true}, {1, {}, false}, {1, {}, true}, {2, {0}, true}}, kStream);
  EXPECT_EQ(op.issue(0), (Waits{{0, kStream}}));
  EXPECT_EQ(op.issue(1), Waits{});
  EXPECT_EQ(op.issue(2), Waits{});
  EXPECT_EQ(op.issue(3), (Waits{{1, kStream}}));
  EXPECT_EQ(op.issue(4), (Waits{{2, op.event(0)}}));  // which came after the stream
}

TEST_F(DeviceQueuesTest, AStreamIsAwaitedByTheHost) {
  LaneOp op(queues_, device_, {{0, {}, true}}, kStream);
  queues_.block(op.op());
  EXPECT_TRUE(op.op().blocked());
  EXPECT_TRUE(queues_.busy());
  int reached = 0;
  const auto count = [&](QueuedOp& which, const Status& status) {
    EXPECT_EQ(&which, &op.op());
    EXPECT_TRUE(status.ok());
    ++reached;
  };
  EXPECT_FALSE(queues_.poll_streams(count));
  device_->ended.insert(kStream);
  EXPECT_TRUE(queues_.poll_streams(count));
  EXPECT_FALSE(queues_.poll_streams(count));
  EXPECT_EQ(reached, 1);
  EXPECT_EQ(op.issue(0), Waits{});  // the lane need not wait any more
}

TEST_F(DeviceQueuesTest, AnEventEndsWhatWasIssuedBeforeIt) {
  LaneOp op(queues_, device_, {{0, {}, false, false}, {0}, {0, {}, false, false}, {1}});
  for (uint32_t i = 0; i < 4; ++i) op.issue(i);
  EXPECT_EQ(op.states().in_flight, 4u);
  EXPECT_EQ(poll(), Ended{});
  device_->ended.insert(op.event(1));
  EXPECT_EQ(poll(), (Ended{{0, true}, {1, true}}));
  EXPECT_EQ(op.states().in_flight, 2u);
  device_->ended.insert(op.event(3));
  EXPECT_EQ(poll(), (Ended{{3, true}}));
  EXPECT_TRUE(device_->events.empty());
  EXPECT_TRUE(queues_.busy());  // the last call of lane 0 has no event
  queues_.mark(op.op());
  device_->ended.insert(device_->last);
  EXPECT_EQ(poll(), (Ended{{2, true}}));
  EXPECT_FALSE(queues_.busy());
}

TEST_F(DeviceQueuesTest, UndoEndsAfterWhatIsQueuedOnItsLane) {
  LaneOp op(queues_, device_, {{0}});
  op.issue(0);
  ASSERT_TRUE(queues_.undo_issued(op.op()).ok());
  device_->ended = {op.event(0), device_->last};
  EXPECT_EQ(poll(), (Ended{{0, true}, {kNoStep, true}}));
}

TEST_F(DeviceQueuesTest, ABrokenDeviceEndsItsCallsWithItsError) {
  LaneOp op(queues_, device_, {{0}, {0, {}, false, false}, {1}});
  for (uint32_t i = 0; i < 2; ++i) op.issue(i);
  device_->broken = true;
  EXPECT_TRUE(queues_.order(op.op(), 2).ok());
  EXPECT_EQ(queues_.issued(op.op(), 2).code(), Code::kDevice);
  EXPECT_EQ(op.states().in_flight, 3u);
  EXPECT_EQ(poll(), (Ended{{0, false}}));
  queues_.mark(op.op());  // no event can be had, so nothing is known of these any more
  EXPECT_EQ(op.states().in_flight, 0u);
  EXPECT_FALSE(queues_.busy());
}

TEST_F(DeviceQueuesTest, AStreamBehindAnOperation) {
  LaneOp op(queues_, device_, {{0, {}, true}, {1}, {2, {}, true}});
  for (uint32_t i = 0; i < 3; ++i) op.issue(i);
  int stream = 0;
  ASSERT_TRUE(DeviceQueues::order_stream(op.op(), &stream).ok());
  EXPECT_EQ(device_->stream_waits.size(), 2u);  // lanes 0 and 2
  EXPECT_EQ(device_->events.size(), 3u);        // the steps' own
  ASSERT_TRUE(DeviceQueues::block_stream(op.op(), *device_, &stream).ok());
  EXPECT_EQ(device_->held, 1u);
  DeviceQueues::unblock_streams(op.op(), *device_);
  DeviceQueues::unblock_streams(op.op(), *device_);
  EXPECT_EQ(device_->held, 0u);
}

TEST_F(DeviceQueuesTest, QueuesOfDevicesThatAreGoneAreForgotten) {
  auto gone = std::make_shared<NotingDevice>();
  const std::weak_ptr<NotingDevice> watch = gone;
  LaneOp(queues_, gone, {{0}});
  gone.reset();
  LaneOp same(queues_, device_, {{0}}), again(queues_, device_, {{0}});
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(same.op().queue(), again.op().queue());
}

}  // namespace
}  // namespace sotto::test
