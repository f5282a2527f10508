// Which steps of the operations in flight run next, and what is left to do of an operation. The
// scheduler has plans and the progress of their steps, and nothing else: no threads, devices,
// transports or clocks. Times are values that the caller passes.
//
// Steps on the device wait in one heap, by priority, then by order of start, then by position in
// the plan. Messages wait for nothing but their predecessors, or, on links that match by order, for
// the rest of their group.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/plan/plan.h"

namespace sotto {

// How far a step of a run has come.
// kHeld: an input that has come, behind which nothing may enter a lane until it is done.
enum class StepProgress : uint8_t { kWaiting = 0, kReady, kIssued, kHeld, kDone };

// How far the steps of a run have come. The next run of the plan uses the same memory.
struct StepStates {
  std::vector<uint32_t> pending;        // per step: predecessors not yet satisfied
  std::vector<StepProgress> progress;   // per step
  std::vector<uint32_t> group_pending;  // per group: steps that are not ready
  uint32_t done = 0;
  uint32_t in_flight = 0;  // calls of lanes that have been issued and are not done
  uint32_t inputs = 0;     // await steps that are done
  uint32_t groups = 0;     // the first so many of the plan's groups have entered their queues

  // As before the first step of a run.
  void reset(const Plan& plan);
};

// The part of an operation that the scheduler needs.
class ScheduledOp {
 public:
  enum class State : uint8_t { kQueued, kRunning, kFailing, kUndoing };

  State state() const { return state_; }
  bool running() const { return state_ == State::kRunning; }
  uint64_t sequence() const { return sequence_; }  // order of start
  int64_t last_progress_ns() const { return last_progress_ns_; }
  int64_t timeout_us() const { return timeout_us_; }
  int32_t priority() const { return priority_; }
  bool blocked() const { return blocked_; }
  bool broken() const { return broken_; }
  bool committing() const { return committing_; }
  const Plan& plan() const { return *plan_; }
  StepStates& steps() const { return *steps_; }
  // Its device takes calls before those that they come after are done.
  bool asynchronous() const { return asynchronous_; }
  // Some of its inputs have not arrived.
  bool awaits_input() const { return steps_->inputs < plan_->awaits.size(); }

 private:
  friend class Scheduler;

  const Plan* plan_ = nullptr;
  StepStates* steps_ = nullptr;
  int32_t priority_ = 0;
  int64_t timeout_us_ = -1;
  uint64_t sequence_ = 0;
  int64_t last_progress_ns_ = 0;
  State state_ = State::kQueued;
  bool asynchronous_ = false;
  bool committing_ = false;  // a step that commits has been issued
  bool any_step_ran_ = false;
  bool broken_ = false;
  bool blocked_ = false;
  std::vector<uint32_t> blocked_steps_;  // ready but for blocked_
};

class Scheduler {
 public:
  struct Ready {
    ScheduledOp* op;
    uint32_t step;
  };
  struct Stall {
    size_t index;
    int64_t stalled_ns;
  };

  // ---- An operation starts ----

  // `plan` and `steps` (reset) live as long as the operation is in flight. timeout_us: of time
  // without progress; negative: none.
  static void bind(ScheduledOp& op, const Plan& plan, StepStates& steps, int32_t priority,
                   int64_t timeout_us);
  // The next one in the order of start.
  void admit(ScheduledOp& op, int64_t now_ns);
  static void set_running(ScheduledOp& op, bool asynchronous, int64_t now_ns);
  // Steps that touch user memory are kept back until let_start.
  static void block(ScheduledOp& op) { op.blocked_ = true; }
  void let_start(ScheduledOp& op);
  // Steps without predecessors. `post(step)` is called for each message that can go to a link that
  // matches by key; here and below.
  template <class Post>
  void start(ScheduledOp& op, Post&& post) {
    for (uint32_t i = 0; i < op.plan_->steps.size(); ++i) {
      if (op.plan_->order.preds(i).empty() && make_ready(op, i)) post(i);
    }
  }
  // All steps of an operation that has ended once are under way again, without being issued.
  void restart(ScheduledOp& op, int64_t now_ns);

  // ---- Steps run ----

  bool empty() const { return ready_.empty(); }
  // The next step for a device; there is one.
  Ready pop();
  // The next one among those of operations for which mine(op) holds.
  template <class Mine>
  std::optional<Ready> pop_of(Mine&& mine) {
    auto next = ready_.end();
    for (auto it = ready_.begin(); it != ready_.end(); ++it) {
      if (mine(*it->op) && (next == ready_.end() || *next < *it)) next = it;
    }
    if (next == ready_.end()) return std::nullopt;
    return take(next);
  }
  // The step is about to be handed over; then: it was.
  static void begin(ScheduledOp& op, uint32_t step);
  static void issued(ScheduledOp& op, uint32_t step) {
    op.steps_->progress[step] = StepProgress::kIssued;
  }
  // What may be queued behind an issued call of a lane becomes ready.
  template <class Post>
  void release_behind(ScheduledOp& op, uint32_t step, Post&& post) {
    release(op, step, true, post);
  }
  // An issued input: nothing is queued behind it, neither on lanes nor elsewhere, until it is done.
  static void hold(ScheduledOp& op, uint32_t step) {
    op.steps_->progress[step] = StepProgress::kHeld;
  }
  // What waits for the step becomes ready. True: that was the last step of a running operation.
  template <class Post>
  bool done(ScheduledOp& op, uint32_t step, int64_t now_ns, Post&& post) {
    const bool held = op.steps_->progress[step] == StepProgress::kHeld;
    op.steps_->progress[step] = StepProgress::kDone;
    ++op.steps_->done;
    if (op.plan_->steps[step].await() != nullptr) ++op.steps_->inputs;
    op.last_progress_ns_ = now_ns;
    if (!op.running()) return false;
    if (held) release(op, step, true, post);
    release(op, step, false, post);
    return op.steps_->done == op.plan_->steps.size();
  }
  // Of an operation that was restarted.
  static void all_done(ScheduledOp& op);

  // ---- An operation ends ----

  // Its device has failed, or peers meant another one: it cannot be finished any more.
  static void break_off(ScheduledOp& op) { op.broken_ = true; }
  // It commits, and needs nothing more of other ranks: a failure of theirs does not end it.
  static bool can_finish(const ScheduledOp& op);
  // Its messages are cut off: they count as done, and `done` is still to be called for each.
  static std::vector<uint32_t> cut_messages(ScheduledOp& op);
  // Nothing more of it is issued.
  void fail(ScheduledOp& op);
  // A failed operation with nothing in flight: whether undo steps take back what it did. What a
  // device has failed to commit is neither the old state nor the new one.
  static bool needs_undo(const ScheduledOp& op) {
    return op.any_step_ran_ && !(op.broken_ && op.committing_) && !op.plan_->undo.empty();
  }
  // Calls run(step, whether a step that it takes back was issued) for what undoes the operation, in
  // order. `all_ran`: all steps were. True if there was anything to run.
  template <class Run>
  static bool undo(ScheduledOp& op, bool all_ran, Run&& run) {
    op.state_ = ScheduledOp::State::kUndoing;
    const Plan& plan = *op.plan_;
    // Kernels that take lists need the addresses that the first step brings.
    bool first = plan.addresses.device != kNoSlot && op.steps_->progress[0] < StepProgress::kIssued;
    bool any = false;
    for (const UndoStep& undo : plan.undo) {
      const bool ran = undo.pair_first != kNoStep && (all_ran || any_issued(op, undo));
      if (undo.only_if_paired_ran && !ran) continue;
      if (std::exchange(first, false)) run(plan.steps[0], false);
      run(undo.step, ran);
      any = true;
    }
    return any;
  }
  // Nothing is left of the operation but what has been issued to its device.
  static bool only_device_left(const ScheduledOp& op) {
    return op.running() && op.steps_->done + op.steps_->in_flight == op.plan_->steps.size();
  }
  // Nothing of it can be issued before the next slice of its messages is let go.
  static bool keeps_back(const ScheduledOp& op) {
    const std::vector<uint32_t>& steps = op.plan_->slice_steps;
    return op.running() && !steps.empty() &&
           op.steps_->done + op.steps_->in_flight == steps[op.steps_->inputs];
  }
  // Since when that is so, and nothing is under way either; `now_ns`: it is not.
  static int64_t keeps_back_since(const ScheduledOp& op, int64_t now_ns) {
    return keeps_back(op) && op.steps_->in_flight == 0 ? op.last_progress_ns_ : now_ns;
  }
  // The next group of messages to enter its queue, if its inputs are there; kNoStep: none. Groups
  // enter in their order.
  static uint32_t next_group(ScheduledOp& op);
  static bool all_groups_entered(const ScheduledOp& op) {
    return op.steps_->groups == op.plan_->messages.groups.size();
  }
  // Of a channel's operations, pointers in the order of start, the first that is over its time. The
  // progress of one is that of those after it too. Time does not count while this rank's inputs
  // have not arrived.
  template <class Ops>
  static std::optional<Stall> find_stall(const Ops& ops, int64_t now_ns) {
    int64_t ahead = 0;
    for (size_t i = 0; i < ops.size(); ++i) {
      const ScheduledOp& op = *ops[i];
      ahead = op.last_progress_ns_ > ahead ? op.last_progress_ns_ : ahead;
      if (!op.running() || op.timeout_us_ < 0 || op.awaits_input()) continue;
      if ((now_ns - ahead) / 1000 >= op.timeout_us_) return Stall{i, now_ns - ahead};
    }
    return std::nullopt;
  }

 private:
  struct Entry {
    int32_t priority;
    uint64_t sequence;
    uint32_t step;
    ScheduledOp* op;
    bool operator<(const Entry& o) const {  // std heap: greatest first
      if (priority != o.priority) return priority < o.priority;
      if (sequence != o.sequence) return sequence > o.sequence;
      return step > o.step;
    }
  };

  // True: the step is a message for a link that matches by key.
  bool make_ready(ScheduledOp& op, uint32_t step);
  Ready take(std::vector<Entry>::iterator entry);
  static bool any_issued(const ScheduledOp& op, const UndoStep& undo);

  // Satisfies edges to successors: those between calls of lanes when the step is issued, the others
  // when it is done.
  template <class Post>
  void release(ScheduledOp& op, uint32_t step, bool lane_edges, Post&& post) {
    const Plan& plan = *op.plan_;
    // The host compares an expected message first.
    const bool from_lane = op.asynchronous_ && on_lane(plan, plan.steps[step]) &&
                           expectation(plan.steps[step]) == nullptr;
    for (const uint32_t next : plan.order.succs(step)) {
      if ((from_lane && on_lane(plan, plan.steps[next])) != lane_edges) continue;
      if (--op.steps_->pending[next] == 0 && make_ready(op, next)) post(next);
    }
  }

  std::vector<Entry> ready_;  // heap
  uint64_t next_sequence_ = 0;
};

}  // namespace sotto
