// What other threads call, and what progress does.
#include "core/engine/engine.h"

#include <algorithm>
#include <thread>

#include "core/base/log.h"
#include "core/engine/launch.h"
#include "core/engine/stall.h"

namespace sotto {
namespace {

// A poll without limit looks so often whether a thread wants the role.
constexpr int64_t kPollSliceUs = 200'000;
// Work is queued on a device, which does not wake the poller.
constexpr int64_t kDeviceBlockUs = 20;
constexpr int64_t kDeadlineCheckNs = 5'000'000;
constexpr int64_t kPollEveryNs = 50'000;   // sockets are served at least so often between kernels
constexpr int64_t kRunBudgetNs = 100'000;  // kernels in a row before sockets are looked at again

}  // namespace

// What was recorded uses the run's memory as long as it can be replayed.
Op::~Op() {
  if (!recorded() || request_.run == nullptr) return;
  request_.channel->unrecord(*request_.run);
  request_.plan->give_back(std::move(request_.run));
}

Status Op::status() const {
  if (!done()) return Status(Code::kInProgress, "the operation has not completed");
  return result_;
}

OpStats Op::stats() const {
  if (done()) return stats_;
  OpStats early;
  early.launch_ns = stats_.launch_ns;
  early.payload_bytes_planned = stats_.payload_bytes_planned;
  early.header_bytes_planned = stats_.header_bytes_planned;
  return early;
}

Engine::Engine(EngineOptions options)
    : options_(std::move(options)), role_(*this, *options_.clock) {
  if (!options_.trace.empty()) trace_ = std::make_unique<Trace>(options_.trace);
  if (options_.progress_thread) role_.start_progress_thread();
}

Engine::~Engine() {
  role_.stop();
  for (const auto& backend : backends_) backend->poller().forward_wakes(nullptr);
  if (trace_ == nullptr) return;
  if (const Status written = trace_->write(); !written.ok())
    log(LogLevel::kError, "{}", written.text());
}

void Engine::add_backend(std::unique_ptr<Backend> backend, bool blocking) {
  Poller* poller = &backend->poller();
  if (blocking || blocking_ == nullptr) {
    for (const auto& other : backends_) other->poller().forward_wakes(poller);
    blocking_ = poller;
    role_.set_serving();
  } else {
    poller->forward_wakes(blocking_);
  }
  backends_.push_back(std::move(backend));
}

void Engine::add_channel(Channel* channel) { channels_.push_back(channel); }

void Engine::remove_channel(Channel* channel) { std::erase(channels_, channel); }

Status Engine::test(const OpRef& op) {
  if (!op->done()) {
    role_.try_drive([&] {
      for (int i = 0; i < 64 && !op->done() && progress(); ++i) {
      }
    });
  }
  run_callbacks();
  return op->status();
}

Status Engine::wait(const OpRef& op, int64_t timeout_us) {
  if (!op->done()) wait_until([&] { return op->done(); }, timeout_us);
  run_callbacks();
  return op->status();
}

Result<size_t> Engine::wait_any(std::span<const OpRef> ops, int64_t timeout_us) {
  size_t found = ops.size();
  const auto any = [&] {
    for (size_t i = 0; i < ops.size(); ++i) {
      if (ops[i] != nullptr && ops[i]->done()) {
        found = i;
        return true;
      }
    }
    return false;
  };
  wait_until(any, timeout_us);
  run_callbacks();
  if (found == ops.size()) return Status(Code::kInProgress, "none of the operations has completed");
  return found;
}

void Engine::poll(int64_t timeout_us) {
  {
    DriverRole::Lock lock(role_);
    bool any = progress();
    if (!any && timeout_us > 0) {
      block(timeout_us);
      any = progress();
    }
    // Without a limit; but a thread that wants the role does not wait for it.
    while (!any && timeout_us < 0 && !role_.claimed()) {
      block(kPollSliceUs);
      any = progress();
    }
    for (int i = 0; i < 64 && progress(); ++i) {
    }
  }
  run_callbacks();
}

void Engine::run_callbacks() {
  for (const OpRef& op : role_.take_callbacks()) {
    op->request_.on_done(op->request_.user, static_cast<int32_t>(op->result_.code()));
  }
}

// ---- starting ----

Result<OpRef> Engine::start(OpRequest request, bool may_block) {
  const auto refused = [&request](Status status) {
    if (request.after != 0) request.plan->device()->release(request.after);
    request.plan->give_back(std::move(request.run));
    return status;
  };
  if (Status failed = request.channel->failure(); !failed.ok()) return refused(std::move(failed));
  const auto room = [&] { return role_.ops_in_flight() < options_.max_ops; };
  if (!room()) {
    const auto full = [&] {
      return error(Code::kBusy, "{} operations are in flight, the limit of this context",
                   options_.max_ops);
    };
    if (!may_block) return refused(full());
    const Deadline deadline = Deadline::in_us(clock(), request.timeout_us);
    while (!room()) {
      if (deadline.passed(clock())) return refused(full());
      poll(1000);
    }
  }
  auto op = pool_->make<Op>();
  op->self_ = op;
  op->stats_.launch_ns = clock().now_ns();
  const PeerTraffic& total = request.plan->plan().total;
  op->stats_.payload_bytes_planned = total.payload_bytes_sent;
  op->stats_.header_bytes_planned = total.header_bytes_sent + total.metadata_bytes_sent;
  request.totals->in_flight.fetch_add(1, std::memory_order_acq_rel);
  const bool waits = request.waits;
  Scheduler::bind(*op, request.plan->plan(), request.run->steps, request.priority,
                  request.timeout_us);
  CapturedOps::bind(*op, std::move(request.recorder));
  op->request_ = std::move(request);
  role_.submit(op, waits);
  return op;
}

// ---- progress (driver) ----

bool Engine::take_inbox() {
  std::vector<DriverRole::Task> tasks;
  if (!role_.take_inbox(&spare_, &tasks)) return false;
  std::vector<OpRef> ops = std::move(spare_);
  for (const OpRef& op : ops) admit(op);
  ops.clear();
  spare_ = std::move(ops);
  for (auto& task : tasks) task();
  if (!tasks.empty()) role_.notify();
  return true;
}

bool Engine::serve_pollers() {
  last_poll_ns_ = clock().now_ns();
  bool any = false;
  for (const auto& backend : backends_) any |= backend->poller().poll(0);
  return any;
}

bool Engine::progress() {
  bool any = take_inbox();
  const bool due = scheduler_.empty() || clock().now_ns() - last_poll_ns_ >= kPollEveryNs;
  if (due) any |= serve_pollers();
  any |= take_completions();
  any |= channels_failed();
  any |= poll_devices();
  any |= poll_captured();
  any |= issue_again();
  any |= run_ready();
  any |= take_completions();
  any |= check_deadlines();
  return any;
}

void Engine::wake() {
  if (Poller* const poller = blocking_; poller != nullptr) poller->wake();
}

void Engine::block(int64_t wait_us) {
  if (queues_.busy() || !captured_.empty()) wait_us = std::min(wait_us, kDeviceBlockUs);
  for (const auto& backend : backends_)
    wait_us = std::min(wait_us, backend->poller().patience_us());
  for (const Channel* channel : channels_) {
    if (!channel->ops_.empty())
      wait_us = std::min<int64_t>(wait_us, 20'000);  // deadlines are looked at
  }
  Poller* const poller = blocking_;
  if (poller == nullptr) {
    std::this_thread::yield();
    return;
  }
  poller->poll(std::max<int64_t>(wait_us, 0));
  last_poll_ns_ = clock().now_ns();
}

bool Engine::poll_devices() {
  const bool streams = queues_.poll_streams([this](QueuedOp& held, const Status& device) {
    Op& op = static_cast<Op&>(held);
    if (!device.ok()) device_failed(op, device);
    scheduler_.let_start(op);
    if (!op.plan().groups.empty()) issue_groups(*op.request_.channel);
  });
  const bool calls = queues_.poll([this](QueuedOp& op, uint32_t step, const Status& device) {
    call_ended(static_cast<Op&>(op), step, device);
  });
  return streams || calls;
}

bool Engine::poll_captured() {
  const auto ended = [this](CapturedOp& captured) {
    Op& op = static_cast<Op&>(captured);
    forget_replay(op);
    op.request_.run->give_up();
    Scheduler::all_done(op);
    finish(op);
  };
  const auto failed = [this](CapturedOp& op, const Status& status) {
    device_failed(static_cast<Op&>(op), status);
  };
  return captured_.poll(ended, failed);
}

// Groups that transports had in progress.
bool Engine::issue_again() {
  bool any = false;
  for (Channel* channel : channels_) {
    const auto in_progress = [](const Link& link) { return link.groups.in_progress(); };
    if (std::ranges::none_of(channel->links().all(), in_progress) || channel->failed()) continue;
    issue_groups(*channel);
    any |= std::ranges::none_of(channel->links().all(), in_progress);
  }
  return any;
}

bool Engine::run_ready() {
  if (scheduler_.empty()) return false;
  const int64_t until = clock().now_ns() + kRunBudgetNs;
  do {
    const Scheduler::Ready next = scheduler_.pop();
    execute(static_cast<Op&>(*next.op), next.step);
  } while (!scheduler_.empty() && clock().now_ns() < until);
  return true;
}

bool Engine::take_completions() {
  if (completions_.empty()) return false;
  while (!completions_.empty()) {
    completions_now_.swap(completions_);
    for (Completion& c : completions_now_) {
      if (c.transfer == nullptr) continue;  // its operation was cancelled meanwhile
      Op& op = *static_cast<Op*>(c.transfer->owner);
      if (c.status.ok()) c.status = check_message(*op.request_.run, c.transfer->step);
      if (c.status.ok()) {
        step_done(op, c.transfer->step);
      } else {
        op.request_.channel->found(c.status, c.transfer->peer);
      }
    }
    completions_now_.clear();
  }
  return true;
}

bool Engine::check_deadlines() {
  const int64_t now = clock().now_ns();
  if (now < next_deadline_check_ns_) return false;
  next_deadline_check_ns_ = now + kDeadlineCheckNs;
  bool any = false;
  for (Channel* channel : channels_) {
    const auto stall = Scheduler::find_stall(channel->ops_, now);
    if (!stall || (channel->proposed_ && !channel->failed())) continue;
    propose_failure(*channel, stall_cause(channel->ops_[stall->index]->request_, channel->control(),
                                          stall->stalled_ns));
    any = true;
  }
  return any;
}

bool Engine::channels_failed() {
  // Every pass comes here: only a failure makes a copy of the list.
  const auto healthy = [](const Channel* c) { return c->found_.empty(); };
  if (std::all_of(channels_.begin(), channels_.end(), healthy)) return false;
  bool any = false;
  for (Channel* channel : std::vector<Channel*>(channels_)) {
    for (const auto& [cause, decided] : std::exchange(channel->found_, {})) {
      decided ? fail_channel(*channel, cause) : propose_failure(*channel, cause);
      any = true;
    }
  }
  return any;
}

}  // namespace sotto
