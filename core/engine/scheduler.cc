#include "core/engine/scheduler.h"

#include <algorithm>

namespace sotto {

void StepStates::reset(const Plan& plan) {
  const size_t count = plan.steps.size();
  pending.resize(count);
  for (size_t i = 0; i < count; ++i) pending[i] = static_cast<uint32_t>(plan.order.preds(i).size());
  progress.assign(count, StepProgress::kWaiting);
  const std::vector<IssueGroup>& of = plan.messages.groups;
  group_pending.resize(of.size());
  for (size_t g = 0; g < of.size(); ++g)
    group_pending[g] = static_cast<uint32_t>(of[g].steps.size());
  done = in_flight = inputs = groups = 0;
}

void Scheduler::bind(ScheduledOp& op, const Plan& plan, StepStates& steps, int32_t priority,
                     int64_t timeout_us) {
  op.plan_ = &plan;
  op.steps_ = &steps;
  op.priority_ = priority;
  op.timeout_us_ = timeout_us;
}

void Scheduler::admit(ScheduledOp& op, int64_t now_ns) {
  op.sequence_ = next_sequence_++;
  op.last_progress_ns_ = now_ns;
}

void Scheduler::set_running(ScheduledOp& op, bool asynchronous, int64_t now_ns) {
  op.last_progress_ns_ = now_ns;
  op.state_ = ScheduledOp::State::kRunning;
  op.asynchronous_ = asynchronous;
}

void Scheduler::let_start(ScheduledOp& op) {
  op.blocked_ = false;
  for (const uint32_t step : op.blocked_steps_) make_ready(op, step);
  op.blocked_steps_.clear();
}

void Scheduler::restart(ScheduledOp& op, int64_t now_ns) {
  admit(op, now_ns);
  set_running(op, op.asynchronous_, now_ns);
  op.any_step_ran_ = true;
  std::fill(op.steps_->progress.begin(), op.steps_->progress.end(), StepProgress::kIssued);
  op.steps_->done = 0;
}

bool Scheduler::make_ready(ScheduledOp& op, uint32_t step) {
  const Step& s = op.plan_->steps[step];
  if (op.steps_->progress[step] == StepProgress::kDone) return false;  // cut_messages
  if (s.await() != nullptr) return false;
  op.steps_->progress[step] = StepProgress::kReady;
  if (const MessageStep* message = s.message()) {
    const PlanLink& link = op.plan_->messages.links[message->lowered.link];
    if (link.matching == Matching::kByKey) return true;
    --op.steps_->group_pending[message->lowered.group];
  } else if (op.blocked_ && s.user) {
    op.blocked_steps_.push_back(step);
  } else {
    ready_.push_back({op.priority_, op.sequence_, step, &op});
    std::push_heap(ready_.begin(), ready_.end());
  }
  return false;
}

Scheduler::Ready Scheduler::pop() {
  std::pop_heap(ready_.begin(), ready_.end());
  const Entry next = ready_.back();
  ready_.pop_back();
  return {next.op, next.step};
}

Scheduler::Ready Scheduler::take(std::vector<Entry>::iterator entry) {
  const Entry chosen = *entry;
  ready_.erase(entry);
  std::make_heap(ready_.begin(), ready_.end());
  return {chosen.op, chosen.step};
}

void Scheduler::begin(ScheduledOp& op, uint32_t step) {
  op.any_step_ran_ = true;
  if (op.plan_->steps[step].phase == Phase::kCommitting) op.committing_ = true;
}

void Scheduler::all_done(ScheduledOp& op) {
  std::fill(op.steps_->progress.begin(), op.steps_->progress.end(), StepProgress::kDone);
  op.steps_->done = static_cast<uint32_t>(op.plan_->steps.size());
}

uint32_t Scheduler::next_group(ScheduledOp& op) {
  const Plan& plan = *op.plan_;
  const std::vector<IssueGroup>& groups = plan.messages.groups;
  uint32_t& entered = op.steps_->groups;
  if (entered == groups.size()) return kNoStep;
  // Those of the group before are there.
  uint32_t input = entered == 0 ? 0 : groups[entered - 1].inputs;
  for (; input < groups[entered].inputs; ++input) {
    if (op.steps_->progress[plan.awaits[input]] < StepProgress::kIssued) return kNoStep;
  }
  return entered++;
}

bool Scheduler::can_finish(const ScheduledOp& op) {
  if (!op.committing_ || op.broken_) return false;
  // Messages that are calls of lanes are the decision's to judge.
  for (uint32_t i = 0; i < op.plan_->steps.size(); ++i) {
    const Step& step = op.plan_->steps[i];
    if (is_receive(step) && !on_lane(*op.plan_, step) &&
        op.steps_->progress[i] != StepProgress::kDone)
      return false;
  }
  return true;
}

std::vector<uint32_t> Scheduler::cut_messages(ScheduledOp& op) {
  std::vector<uint32_t> cut;
  for (uint32_t i = 0; i < op.plan_->steps.size(); ++i) {
    if (on_lane(*op.plan_, op.plan_->steps[i]) || op.steps_->progress[i] == StepProgress::kDone)
      continue;
    op.steps_->progress[i] = StepProgress::kDone;
    cut.push_back(i);
  }
  return cut;
}

void Scheduler::fail(ScheduledOp& op) {
  op.state_ = ScheduledOp::State::kFailing;
  op.blocked_ = false;
  op.blocked_steps_.clear();
  std::erase_if(ready_, [&](const Entry& e) { return e.op == &op; });
  std::make_heap(ready_.begin(), ready_.end());
}

bool Scheduler::any_issued(const ScheduledOp& op, const UndoStep& undo) {
  for (uint32_t s = undo.pair_first; s <= undo.pair_last; ++s) {
    if (op.steps_->progress[s] >= StepProgress::kIssued) return true;
  }
  return false;
}

}  // namespace sotto
