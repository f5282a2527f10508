// What progress does.
#include "core/engine/executor.h"

#include <algorithm>

#include "core/base/log.h"
#include "core/engine/launch.h"
#include "core/engine/stall.h"

namespace sotto {
namespace {

// Work is queued on a device, which does not wake the poller.
constexpr int64_t kDeviceBlockUs = 20;
constexpr int64_t kDeadlineCheckNs = 5'000'000;
constexpr int64_t kRunBudgetNs = 100'000;  // kernels in a row before sockets are looked at again

}  // namespace

Executor::Executor(const Clock& clock, DriverRole& role, Trace* trace, int64_t spin_us)
    : clock_(clock), role_(role), trace_(trace), pollers_(spin_us) {}

Executor::~Executor() {
  if (trace_ == nullptr) return;
  if (const Status written = trace_->write(); !written.ok())
    log(LogLevel::kError, "{}", written.text());
}

bool Executor::take_inbox() {
  std::vector<DriverRole::Task> tasks;
  if (!role_.take_inbox(&spare_, &tasks)) return false;
  now_ns_ = clock_.now_ns();
  std::vector<Handover> items = std::move(spare_);
  for (const Handover& item : items)
    item.input == Handover::kStart ? admit(item.op) : input_arrived(*item.op, item);
  items.clear();
  spare_ = std::move(items);
  for (auto& task : tasks) task();
  if (!tasks.empty()) role_.notify();
  return true;
}

bool Executor::progress() {
  now_ns_ = clock_.now_ns();
  bool any = take_inbox();
  any |= take_completions();
  any |= pollers_.serve_due(now_ns_, !any && scheduler_.empty());
  any |= take_completions();
  any |= channels_failed();
  any |= poll_devices();
  any |= issue_again();
  any |= begin_waiting();
  any |= run_ready();
  any |= take_completions();
  any |= check_deadlines();
  if (stream_orders_.settle()) {
    role_.notify();
    any = true;
  }
  return any;
}

void Executor::block(int64_t wait_us) {
  if (queues_.busy() || !captured_.empty()) wait_us = std::min(wait_us, kDeviceBlockUs);
  for (const Channel* channel : channels_) {
    if (!channel->ops_.empty())
      wait_us = std::min<int64_t>(wait_us, 20'000);  // deadlines are looked at
  }
  pollers_.wait(wait_us);
}

bool Executor::poll_devices() {
  const bool streams = queues_.poll_streams([this](QueuedOp& blocked, const Status& device) {
    Op& op = static_cast<Op&>(blocked);
    if (!device.ok()) device_failed(op, device);
    scheduler_.let_start(op);
    if (!op.plan().messages.groups.empty()) issue_groups(*op.request_.channel);
  });
  const bool calls = queues_.poll([this](QueuedOp& op, uint32_t step, const Status& device) {
    call_ended(static_cast<Op&>(op), step, device);
  });
  const auto ended = [this](CapturedOp& captured) {
    Op& op = static_cast<Op&>(captured);
    forget_replay(op);
    op.request_.run->abort();
    Scheduler::all_done(op);
    finish(op);
  };
  const auto failed = [this](CapturedOp& op, const Status& status) {
    device_failed(static_cast<Op&>(op), status);
  };
  const bool launches = captured_.poll(ended, failed);
  return streams || calls || launches;
}

// Groups that transports had in progress.
bool Executor::issue_again() {
  bool any = false;
  for (Channel* channel : channels_) {
    const auto in_progress = [](const Link& link) { return link.groups->in_progress(); };
    if (std::ranges::none_of(channel->links().all(), in_progress)) continue;
    issue_groups(*channel);
    any |= std::ranges::none_of(channel->links().all(), in_progress);
  }
  return any;
}

// Operations whose predecessors have ended.
bool Executor::begin_waiting() {
  const auto due = [](const OpRef& op) {
    return op->done() || std::ranges::all_of(op->request_.after_ops,
                                             [](const OpRef& before) { return before->done(); });
  };
  bool any = false;
  for (auto it = std::ranges::find_if(waiting_, due); it != waiting_.end();
       it = std::ranges::find_if(waiting_, due)) {
    const OpRef op = std::move(*it);
    waiting_.erase(it);
    any = true;
    if (!op->done()) begin(*op);
  }
  return any;
}

bool Executor::run_ready() {
  if (scheduler_.empty()) return false;
  const int64_t until = now_ns_ + kRunBudgetNs;
  do {
    const Scheduler::Ready next = scheduler_.pop();
    execute(static_cast<Op&>(*next.op), next.step);
  } while (!scheduler_.empty() && clock_.now_ns() < until);
  return true;
}

bool Executor::take_completions() {
  return completions_.take([this](const Transfer& transfer, Status status) {
    Op& op = *static_cast<Op*>(transfer.owner);
    if (status.ok()) status = check_message(*op.request_.run, transfer.step);
    if (status.ok()) {
      step_done(op, transfer.step);
    } else {
      op.request_.channel->found(status, transfer.peer);
    }
  });
}

bool Executor::check_deadlines() {
  if (now_ns_ < next_deadline_check_ns_) return false;
  next_deadline_check_ns_ = now_ns_ + kDeadlineCheckNs;
  bool any = false;
  for (Channel* channel : channels_) {
    const auto stall = Scheduler::find_stall(channel->ops_, now_ns_);
    if (!stall || (channel->proposed_ && !channel->failed())) continue;
    propose_failure(*channel, stall_cause(channel->ops_[stall->index]->request_, channel->control(),
                                          stall->stalled_ns));
    any = true;
  }
  return any;
}

// What channels have found, and operations that were cancelled while a link still touched them.
bool Executor::channels_failed() {
  // Every pass comes here: only a failure makes a copy of the list.
  const auto settles = [](const Channel* c) { return c->settling_ && c->settled(); };
  const auto quiet = [&](const Channel* c) { return c->found_.empty() && !settles(c); };
  if (std::ranges::all_of(channels_, quiet)) return false;
  for (Channel* channel : channels_.copy()) {
    for (const auto& [cause, decided] : std::exchange(channel->found_, {}))
      decided ? fail_channel(*channel, cause) : propose_failure(*channel, cause);
    if (!settles(channel)) continue;
    channel->settling_ = false;
    const Status status = channel->failure();
    for (const OpRef& op : std::vector<OpRef>(channel->ops_))
      op->state() == Op::State::kFailing ? settle_failed(*op) : fail_op(*op, status);
  }
  return true;
}

}  // namespace sotto
