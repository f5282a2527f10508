// The order in which steps run, when an operation is complete, and what is undone of one that
// fails: of plans that are written down here, on made-up devices and transports.
#include "core/engine/scheduler.h"

#include <gtest/gtest.h>

#include <memory>

namespace sotto::test {
namespace {

using Steps = std::vector<uint32_t>;

// A plan whose steps and edges are given; the rest is what lower() would make of it.
class PlanOfSteps {
 public:
  uint32_t add(StepWork work, Steps after = {}, Phase phase = Phase::kBody) {
    Step step;
    step.phase = phase;
    step.work = std::move(work);
    plan_.steps.push_back(step);
    after_.push_back(std::move(after));
    return static_cast<uint32_t>(plan_.steps.size()) - 1;
  }
  uint32_t kernel(Steps after = {}) { return add(KernelStep{}, std::move(after)); }
  uint32_t commit(Steps after = {}) {
    return add(KernelStep{}, std::move(after), Phase::kCommitting);
  }
  uint32_t send(Steps after = {}) { return message(true, std::move(after)); }
  uint32_t receive(Steps after = {}) { return message(false, std::move(after)); }
  uint32_t message(bool is_send, Steps after) {
    MessageStep work;
    work.is_send = is_send;
    return add(std::move(work), std::move(after));
  }
  // Undo steps are told apart by the lane.
  void undo(uint16_t mark, uint32_t first, uint32_t last, bool only_if_paired_ran) {
    UndoStep step;
    step.step.lane = mark;
    step.pair_first = first;
    step.pair_last = last;
    step.only_if_paired_ran = only_if_paired_ran;
    plan_.undo.push_back(step);
  }
  Plan& raw() { return plan_; }
  const Plan& plan() {
    if (plan_.messages.links.empty()) plan_.messages.links.emplace_back();
    const size_t count = plan_.steps.size();
    plan_.order.pred_begin.assign(1, 0);
    plan_.order.succ_begin.assign(1, 0);
    plan_.order.predecessors.clear();
    plan_.order.successors.clear();
    for (uint32_t i = 0; i < count; ++i) {
      plan_.order.predecessors.insert(plan_.order.predecessors.end(), after_[i].begin(),
                                      after_[i].end());
      plan_.order.pred_begin.push_back(static_cast<uint32_t>(plan_.order.predecessors.size()));
      for (uint32_t next = 0; next < count; ++next) {
        for (const uint32_t before : after_[next]) {
          if (before == i) plan_.order.successors.push_back(next);
        }
      }
      plan_.order.succ_begin.push_back(static_cast<uint32_t>(plan_.order.successors.size()));
    }
    return plan_;
  }

 private:
  Plan plan_;
  std::vector<Steps> after_;
};

// An operation in a scheduler. Messages that can go are noted, and done when a test says so.
class Operation {
  auto poster() {
    return [this](uint32_t step) {
      issue(step);
      messages_.push_back(step);
    };
  }

 public:
  Operation(Scheduler& scheduler, const Plan& plan, int32_t priority = 0, bool asynchronous = false,
            int64_t timeout_us = -1, int64_t now_ns = 0)
      : scheduler_(scheduler) {
    steps_.reset(plan);
    Scheduler::bind(op_, plan, steps_, priority, timeout_us);
    scheduler_.admit(op_, now_ns);
    Scheduler::set_running(op_, asynchronous, now_ns);
  }
  Operation& start() {
    scheduler_.start(op_, poster());
    return *this;
  }
  // As the engine does on a synchronous device.
  bool run(uint32_t step, int64_t now_ns = 0) {
    issue(step);
    return done(step, now_ns);
  }
  void issue(uint32_t step) {
    Scheduler::begin(op_, step);
    Scheduler::issued(op_, step);
  }
  bool done(uint32_t step, int64_t now_ns = 0) {
    return scheduler_.done(op_, step, now_ns, poster());
  }
  void release_behind(uint32_t step) { scheduler_.release_behind(op_, step, poster()); }
  // What is undone: marks of undo steps, negative (-1 - mark) if what they take back did not run.
  std::vector<int> undo(bool all_ran = false) {
    std::vector<int> marks;
    Scheduler::undo(op_, all_ran, [&](const Step& step, bool ran) {
      marks.push_back(ran ? step.lane : -1 - step.lane);
    });
    return marks;
  }
  ScheduledOp& op() { return op_; }
  Steps take_messages() { return std::exchange(messages_, {}); }

 private:
  Scheduler& scheduler_;
  StepStates steps_;
  ScheduledOp op_;
  Steps messages_;
};

using Order = std::vector<std::pair<const ScheduledOp*, uint32_t>>;

// What is ready, in its order, without what becomes ready with it.
Order drain(Scheduler& scheduler) {
  Order order;
  while (!scheduler.empty()) {
    const Scheduler::Ready next = scheduler.pop();
    order.emplace_back(next.op, next.step);
  }
  return order;
}

TEST(Scheduler, PriorityThenOrderOfStartThenPosition) {
  PlanOfSteps two;
  two.kernel();
  two.kernel();
  const Plan& plan = two.plan();
  Scheduler scheduler;
  Operation first(scheduler, plan), second(scheduler, plan), urgent(scheduler, plan, 1),
      lazy(scheduler, plan, -1);
  lazy.start();
  second.start();
  urgent.start();
  first.start();
  EXPECT_EQ(drain(scheduler), (Order{{&urgent.op(), 0},
                                     {&urgent.op(), 1},
                                     {&first.op(), 0},
                                     {&first.op(), 1},
                                     {&second.op(), 0},
                                     {&second.op(), 1},
                                     {&lazy.op(), 0},
                                     {&lazy.op(), 1}}));
}

TEST(Scheduler, OneOperationsStepsAheadOfOthers) {
  PlanOfSteps three;
  for (int i = 0; i < 3; ++i) three.kernel();
  const Plan& plan = three.plan();
  Scheduler scheduler;
  Operation urgent(scheduler, plan, 1), mine(scheduler, plan);
  urgent.start();
  mine.start();
  const auto is_mine = [&](const ScheduledOp& op) { return &op == &mine.op(); };
  Steps order;
  while (const auto next = scheduler.pop_of(is_mine)) order.push_back(next->step);
  EXPECT_EQ(order, (Steps{0, 1, 2}));
  EXPECT_EQ(drain(scheduler), (Order{{&urgent.op(), 0}, {&urgent.op(), 1}, {&urgent.op(), 2}}));
}

TEST(Scheduler, ReadyWhenAllPredecessorsAreDone) {
  PlanOfSteps diamond;
  const uint32_t top = diamond.kernel();
  const uint32_t left = diamond.kernel({top}), right = diamond.kernel({top});
  const uint32_t bottom = diamond.kernel({left, right});
  const uint32_t send = diamond.send({right});
  Scheduler scheduler;
  Operation operation(scheduler, diamond.plan());
  operation.start();
  EXPECT_EQ(drain(scheduler), (Order{{&operation.op(), top}}));
  EXPECT_FALSE(operation.run(top));
  EXPECT_EQ(drain(scheduler), (Order{{&operation.op(), left}, {&operation.op(), right}}));
  EXPECT_FALSE(operation.run(right));
  EXPECT_TRUE(scheduler.empty());
  EXPECT_EQ(operation.take_messages(), (Steps{send}));
  EXPECT_FALSE(operation.run(left));
  EXPECT_EQ(drain(scheduler), (Order{{&operation.op(), bottom}}));
}

TEST(Scheduler, CompleteOnceAndWithTheLastStep) {
  PlanOfSteps mixed;
  const uint32_t kernel = mixed.kernel();
  const uint32_t send = mixed.send({kernel}), receive = mixed.receive();
  const uint32_t last = mixed.kernel({receive});
  Scheduler scheduler;
  Operation operation(scheduler, mixed.plan());
  operation.start();
  EXPECT_EQ(operation.take_messages(), (Steps{receive}));
  int complete = 0;
  complete += operation.done(receive);
  complete += operation.run(last);
  complete += operation.run(kernel);
  EXPECT_EQ(complete, 0);
  EXPECT_TRUE(operation.done(send));
  EXPECT_EQ(operation.op().steps().done, 4u);
}

TEST(Scheduler, CallsOfLanesAreQueuedBehindEachOther) {
  PlanOfSteps chain;
  const uint32_t first = chain.kernel();
  const uint32_t second = chain.kernel({first});
  const uint32_t send = chain.send({first});
  Scheduler scheduler;
  Operation operation(scheduler, chain.plan(), 0, true);
  operation.start();
  EXPECT_EQ(drain(scheduler), (Order{{&operation.op(), first}}));
  operation.issue(first);
  operation.release_behind(first);  // the message waits until the device is done
  EXPECT_EQ(drain(scheduler), (Order{{&operation.op(), second}}));
  EXPECT_TRUE(operation.take_messages().empty());
  EXPECT_FALSE(operation.done(first));
  EXPECT_TRUE(scheduler.empty());
  EXPECT_EQ(operation.take_messages(), (Steps{send}));
}

TEST(Scheduler, NothingIsQueuedBehindACallWhoseMessageIsLookedAt) {
  PlanOfSteps chain;
  const uint32_t first = chain.add(CopyStep{{}, {}, std::make_shared<Expectation>()});
  const uint32_t second = chain.kernel({first});
  Scheduler scheduler;
  Operation operation(scheduler, chain.plan(), 0, true);
  operation.start();
  drain(scheduler);
  operation.issue(first);
  operation.release_behind(first);
  EXPECT_TRUE(scheduler.empty());
  operation.done(first);
  EXPECT_EQ(drain(scheduler), (Order{{&operation.op(), second}}));
}

TEST(Scheduler, GroupsCountDown) {
  PlanOfSteps rounds;
  const uint32_t kernel = rounds.kernel();
  const uint32_t send = rounds.send({kernel}), receive = rounds.receive();
  Plan& raw = rounds.raw();
  raw.messages.links = {{Matching::kByOrder, false}};
  raw.messages.groups = {{0, {send, receive}, 0}};
  Scheduler scheduler;
  Operation operation(scheduler, rounds.plan());
  operation.start();
  EXPECT_EQ(operation.op().steps().group_pending[0], 1u);
  EXPECT_FALSE(operation.run(scheduler.pop().step));
  EXPECT_EQ(operation.op().steps().group_pending[0], 0u);
  EXPECT_TRUE(operation.take_messages().empty());
}

// Two slices: one message each, the second one behind an input.
TEST(Scheduler, SlicesAreKeptBack) {
  PlanOfSteps slices;
  const uint32_t await = slices.add(AwaitStep{});
  const uint32_t first = slices.send(), second = slices.send({first});
  Plan& raw = slices.raw();
  raw.awaits = {await};
  raw.messages.links = {{Matching::kByOrder, false}};
  raw.messages.groups = {{0, {first}, 0}, {0, {second}, 1}};
  raw.slice_steps = {1, 3};
  Scheduler scheduler;
  Operation operation(scheduler, slices.plan());
  operation.start();
  const ScheduledOp& op = operation.op();
  EXPECT_FALSE(Scheduler::keeps_back(op));
  EXPECT_EQ(Scheduler::keeps_back_since(op, 50), 50);
  operation.done(first);
  EXPECT_TRUE(Scheduler::keeps_back(op));
  EXPECT_EQ(Scheduler::keeps_back_since(op, 50), op.last_progress_ns());
  operation.done(await);
  EXPECT_FALSE(Scheduler::keeps_back(op));
  operation.done(second);
  EXPECT_EQ(Scheduler::keeps_back_since(op, 50), op.last_progress_ns());  // it has ended
}

TEST(Scheduler, StepsOnUserMemoryAreKeptBack) {
  PlanOfSteps two;
  const uint32_t touches = two.kernel(), other = two.kernel();
  two.raw().steps[touches].user = true;
  Scheduler scheduler;
  Operation operation(scheduler, two.plan(), 0, true);
  Scheduler::block(operation.op());
  operation.start();
  EXPECT_EQ(drain(scheduler), (Order{{&operation.op(), other}}));
  scheduler.let_start(operation.op());
  EXPECT_FALSE(operation.op().blocked());
  EXPECT_EQ(drain(scheduler), (Order{{&operation.op(), touches}}));
}

TEST(Scheduler, FailureDropsWhatIsReady) {
  PlanOfSteps two;
  const uint32_t first = two.kernel();
  two.kernel();
  const uint32_t behind = two.kernel({first});
  const Plan& plan = two.plan();
  Scheduler scheduler;
  Operation failing(scheduler, plan), healthy(scheduler, plan);
  failing.start();
  healthy.start();
  failing.issue(scheduler.pop().step);
  scheduler.fail(failing.op());
  EXPECT_FALSE(failing.done(first));  // and releases nothing
  EXPECT_EQ(failing.op().steps().progress[behind], StepProgress::kWaiting);
  EXPECT_EQ(drain(scheduler), (Order{{&healthy.op(), 0}, {&healthy.op(), 1}}));
}

// Undo steps run in the order of the plan. One that is paired runs if a step of its pair was
// issued, done or not, or is told that none was.
TEST(Scheduler, FailureInTheMiddleIsUndone) {
  PlanOfSteps encode;
  const uint32_t a = encode.kernel(), b = encode.kernel({a}), c = encode.kernel({b});
  encode.undo(1, a, b, true);
  encode.undo(2, b, c, true);
  encode.undo(3, c, c, true);
  encode.undo(4, c, c, false);
  encode.undo(5, kNoStep, kNoStep, false);
  encode.undo(6, kNoStep, kNoStep, true);
  const Plan& plan = encode.plan();
  Scheduler scheduler;
  Operation untouched(scheduler, plan);
  untouched.start();
  scheduler.fail(untouched.op());
  EXPECT_FALSE(Scheduler::needs_undo(untouched.op()));

  Operation operation(scheduler, plan);
  operation.start();
  operation.run(a);
  operation.issue(b);
  scheduler.fail(operation.op());
  EXPECT_TRUE(Scheduler::needs_undo(operation.op()));
  EXPECT_EQ(operation.undo(), (std::vector<int>{1, 2, -5, -6}));
  EXPECT_EQ(operation.op().state(), ScheduledOp::State::kUndoing);

  Operation whole(scheduler, plan);
  EXPECT_EQ(whole.undo(true), (std::vector<int>{1, 2, 3, 4, -6}));
}

TEST(Scheduler, UndoBringsAddressesIfTheFirstStepDidNot) {
  PlanOfSteps lists;
  const uint32_t addresses = lists.kernel(), encode = lists.kernel({addresses});
  lists.raw().steps[addresses].lane = 7;
  lists.raw().addresses.device = 0;
  lists.undo(1, encode, encode, true);
  lists.undo(2, kNoStep, kNoStep, false);
  const Plan& plan = lists.plan();
  Scheduler scheduler;
  Operation operation(scheduler, plan);
  EXPECT_EQ(operation.undo(), (std::vector<int>{-8, -3}));
  Operation issued(scheduler, plan);
  issued.issue(addresses);
  EXPECT_EQ(issued.undo(), (std::vector<int>{-3}));
}

TEST(Scheduler, WhatCommitsIsFinishedWithoutItsSends) {
  PlanOfSteps step;
  const uint32_t receive = step.receive();
  const uint32_t commit = step.commit({receive});
  const uint32_t after = step.kernel({commit}), send = step.send({after});
  step.undo(1, kNoStep, kNoStep, false);
  Scheduler scheduler;
  Operation operation(scheduler, step.plan());
  operation.start();
  EXPECT_EQ(operation.take_messages(), (Steps{receive}));
  EXPECT_FALSE(operation.done(receive));
  EXPECT_FALSE(Scheduler::can_finish(operation.op()));  // nothing has committed
  EXPECT_FALSE(operation.run(scheduler.pop().step));
  ASSERT_TRUE(Scheduler::can_finish(operation.op()));
  EXPECT_EQ(Scheduler::cut_messages(operation.op()), (Steps{send}));
  EXPECT_FALSE(operation.done(send));
  EXPECT_TRUE(operation.run(scheduler.pop().step));  // with the last kernel, not with the message
  EXPECT_TRUE(operation.take_messages().empty());
}

TEST(Scheduler, WhatADeviceFailedToCommitIsNeitherFinishedNorUndone) {
  PlanOfSteps step;
  const uint32_t commit = step.commit();
  step.undo(1, kNoStep, kNoStep, false);
  Scheduler scheduler;
  Operation operation(scheduler, step.plan());
  operation.start();
  operation.issue(commit);
  Scheduler::break_off(operation.op());
  EXPECT_FALSE(Scheduler::can_finish(operation.op()));
  scheduler.fail(operation.op());
  EXPECT_FALSE(Scheduler::needs_undo(operation.op()));
}

TEST(Scheduler, CommittingWithoutItsMessagesCannotBeFinished) {
  PlanOfSteps step;
  const uint32_t commit = step.commit();
  step.receive();
  Scheduler scheduler;
  Operation operation(scheduler, step.plan());
  operation.start();
  operation.issue(commit);
  EXPECT_FALSE(Scheduler::can_finish(operation.op()));
}

TEST(Scheduler, OnlyTheDeviceIsLeft) {
  PlanOfSteps two;
  const uint32_t receive = two.receive(), kernel = two.kernel({receive});
  Scheduler scheduler;
  Operation operation(scheduler, two.plan(), 0, true);
  operation.start();
  EXPECT_FALSE(Scheduler::only_device_left(operation.op()));
  operation.done(receive);
  operation.issue(kernel);
  ++operation.op().steps().in_flight;
  EXPECT_TRUE(Scheduler::only_device_left(operation.op()));
}

TEST(Scheduler, RestartedStepsEndTogether) {
  PlanOfSteps two;
  two.kernel();
  two.kernel();
  Scheduler scheduler;
  Operation operation(scheduler, two.plan()), later(scheduler, two.plan());
  const uint64_t first = operation.op().sequence();
  scheduler.restart(operation.op(), 7);
  EXPECT_GT(operation.op().sequence(), later.op().sequence());
  EXPECT_GT(operation.op().sequence(), first);
  EXPECT_EQ(operation.op().last_progress_ns(), 7);
  EXPECT_EQ(operation.op().steps().done, 0u);
  Scheduler::all_done(operation.op());
  EXPECT_EQ(operation.op().steps().done, 2u);
}

constexpr int64_t kMs = 1'000'000;

TEST(Scheduler, StallCountsFromTheLastProgressOfThisOrAnEarlierOperation) {
  PlanOfSteps two;
  two.receive();
  two.receive();
  const Plan& plan = two.plan();
  Scheduler scheduler;
  Operation patient(scheduler, plan), hasty(scheduler, plan, 0, false, 5000);
  patient.start();
  hasty.start();
  const std::vector<ScheduledOp*> ops{&patient.op(), &hasty.op()};
  EXPECT_FALSE(Scheduler::find_stall(ops, 5 * kMs - 1).has_value());
  const auto stall = Scheduler::find_stall(ops, 5 * kMs);
  ASSERT_TRUE(stall.has_value());
  EXPECT_EQ(stall->index, 1u);
  EXPECT_EQ(stall->stalled_ns, 5 * kMs);
  patient.done(0, 3 * kMs);
  EXPECT_FALSE(Scheduler::find_stall(ops, 8 * kMs - 1).has_value());
  EXPECT_TRUE(Scheduler::find_stall(ops, 8 * kMs).has_value());
  hasty.done(0, 6 * kMs);
  EXPECT_FALSE(Scheduler::find_stall(ops, 10 * kMs).has_value());
  scheduler.fail(hasty.op());  // no longer waits for anything
  EXPECT_FALSE(Scheduler::find_stall(ops, 1000 * kMs).has_value());
}

// ---- inputs that arrive ----

TEST(Scheduler, AnInputIsDoneWhenItIsSaidToBe) {
  for (const bool asynchronous : {false, true}) {
    PlanOfSteps inputs;
    const uint32_t first = inputs.add(AwaitStep{}), second = inputs.add(AwaitStep{});
    const uint32_t one = inputs.kernel({first}), both = inputs.kernel({first, second});
    const uint32_t send = inputs.send({second});
    inputs.raw().awaits = {first, second};
    Scheduler scheduler;
    Operation operation(scheduler, inputs.plan(), 0, asynchronous);
    operation.start();
    EXPECT_TRUE(scheduler.empty());
    EXPECT_TRUE(operation.op().awaits_input());
    Scheduler::issued(operation.op(), second);
    // Calls of lanes go behind the event of an input, messages wait for its end.
    if (asynchronous) operation.release_behind(second);
    EXPECT_EQ(operation.take_messages(), Steps{});
    EXPECT_TRUE(scheduler.empty());
    operation.done(second);
    EXPECT_EQ(operation.take_messages(), Steps{send});
    Scheduler::issued(operation.op(), first);
    if (asynchronous) operation.release_behind(first);
    EXPECT_EQ(scheduler.empty(), !asynchronous);
    operation.done(first);
    EXPECT_FALSE(operation.op().awaits_input());
    EXPECT_EQ(drain(scheduler), (Order{{&operation.op(), one}, {&operation.op(), both}}));
  }
}

TEST(Scheduler, NothingGoesBehindAnInputThatIsHeld) {
  PlanOfSteps inputs;
  const uint32_t input = inputs.add(AwaitStep{});
  const uint32_t kernel = inputs.kernel({input}), send = inputs.send({input});
  inputs.raw().awaits = {input};
  Scheduler scheduler;
  Operation operation(scheduler, inputs.plan(), 0, true);
  operation.start();
  Scheduler::issued(operation.op(), input);
  Scheduler::hold(operation.op(), input);
  EXPECT_TRUE(scheduler.empty());
  EXPECT_FALSE(Scheduler::only_device_left(operation.op()));
  operation.done(input);
  EXPECT_EQ(operation.take_messages(), Steps{send});
  EXPECT_EQ(drain(scheduler), (Order{{&operation.op(), kernel}}));
}

TEST(Scheduler, GroupsEnterTheirQueueInOrderAsInputsCome) {
  PlanOfSteps inputs;
  const uint32_t first = inputs.add(AwaitStep{}), second = inputs.add(AwaitStep{});
  const uint32_t a = inputs.send(), b = inputs.send(), c = inputs.send();
  Plan& raw = inputs.raw();
  raw.messages.links = {{Matching::kByOrder, false}};
  raw.awaits = {first, second};
  raw.messages.groups = {{0, {a}, 0}, {0, {b}, 1}, {0, {c}, 2}};
  Scheduler scheduler;
  Operation operation(scheduler, inputs.plan());
  ScheduledOp& op = operation.op();
  EXPECT_EQ(Scheduler::next_group(op), 0u);
  EXPECT_EQ(Scheduler::next_group(op), kNoStep);
  Scheduler::issued(op, second);
  EXPECT_EQ(Scheduler::next_group(op), kNoStep);
  Scheduler::issued(op, first);
  EXPECT_EQ(Scheduler::next_group(op), 1u);
  EXPECT_EQ(Scheduler::next_group(op), 2u);
  EXPECT_EQ(Scheduler::next_group(op), kNoStep);
}

TEST(Scheduler, NoOperationStallsWithoutItsInputs) {
  PlanOfSteps inputs;
  const uint32_t input = inputs.add(AwaitStep{});
  inputs.receive();
  inputs.raw().awaits = {input};
  Scheduler scheduler;
  Operation operation(scheduler, inputs.plan(), 0, false, 10);
  operation.start();
  const std::vector<ScheduledOp*> ops{&operation.op()};
  EXPECT_FALSE(Scheduler::find_stall(ops, 1'000'000));
  operation.done(input, 1'000'000);
  EXPECT_FALSE(Scheduler::find_stall(ops, 1'009'999));
  EXPECT_TRUE(Scheduler::find_stall(ops, 1'010'000));
}

}  // namespace
}  // namespace sotto::test
