// Who drives, waiting, progress.
#include "core/engine/engine.h"

#include <algorithm>

#include "core/base/log.h"

namespace sotto {
namespace {

constexpr int64_t kNever = INT64_MAX;
// No thread waits: sockets and submissions wake the poller.
constexpr int64_t kIdleBlockUs = 200'000;
// Work is queued on a device, which does not wake the poller.
constexpr int64_t kDeviceBlockUs = 20;
constexpr int64_t kDeadlineCheckNs = 5'000'000;
// How long the role stays free after its last holder when there is nothing in flight, and how often
// the progress thread looks.
constexpr int64_t kLingerNs = 5'000'000;
constexpr auto kPark = std::chrono::milliseconds(10);
constexpr int64_t kPollEveryNs = 50'000;  // sockets are served at least so often between kernels

// Deadlines of short waits. On the system clock, because thread sanitizers know the wait on it and
// not the one on the steady clock; a clock that is set makes one such wait shorter or longer.
template <class Duration>
auto soon(Duration wait) {
  return std::chrono::system_clock::now() + wait;
}

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

Engine::Engine(EngineOptions options) : options_(std::move(options)) {
  if (!options_.trace.empty()) trace_ = std::make_unique<Trace>(options_.trace);
  if (options_.progress_thread) thread_ = std::thread([this] { progress_thread_main(); });
}

Engine::~Engine() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  parked_.notify_all();
  wake();
  if (thread_.joinable()) thread_.join();
  for (const auto& backend : backends_) backend->poller().forward_wakes(nullptr);
  if (trace_ == nullptr) return;
  if (const Status written = trace_->write(); !written.ok())
    log(LogLevel::kError, "{}", written.text());
}

void Engine::add_backend(std::unique_ptr<Backend> backend, bool blocking) {
  Poller* poller = &backend->poller();
  if (blocking || blocking_ == nullptr) {
    for (const auto& other : backends_) other->poller().forward_wakes(poller);
    std::lock_guard lock(mutex_);
    blocking_ = poller;
  } else {
    poller->forward_wakes(blocking_);
  }
  backends_.push_back(std::move(backend));
}

void Engine::add_channel(Channel* channel) { channels_.push_back(channel); }

void Engine::remove_channel(Channel* channel) { std::erase(channels_, channel); }

// ---- the driver's role ----

Engine::RoleLock::RoleLock(Engine& engine) : engine_(engine) {
  std::unique_lock lock(engine_.mutex_);
  if (engine_.driving_ && engine_.driver_ == std::this_thread::get_id()) {
    nested_ = true;
    return;
  }
  ++engine_.claims_;
  ++engine_.waiters_;
  while (engine_.driving_) {
    lock.unlock();
    engine_.wake();
    lock.lock();
    if (engine_.driving_) engine_.changed_.wait(lock);
  }
  engine_.driving_ = true;
  engine_.driver_ = std::this_thread::get_id();
  --engine_.claims_;
}

Engine::RoleLock::~RoleLock() {
  if (nested_) return;
  std::lock_guard lock(engine_.mutex_);
  --engine_.waiters_;
  engine_.leave_role();
}

// The progress thread takes over at once if there is work for it. Otherwise it leaves the role
// alone for a moment: whoever comes next would have to get it back from a thread that sleeps in a
// poller.
void Engine::leave_role() {
  driving_ = false;
  left_ns_ = clock().now_ns();
  changed_.notify_all();
  if (waiters_ == 0 && ops_in_flight_ > 0) parked_.notify_one();
}

bool Engine::background_due() const {
  if (driving_ || waiters_ > 0 || blocking_ == nullptr) return false;
  return ops_in_flight_ > 0 || !tasks_.empty() || clock().now_ns() - left_ns_ >= kLingerNs;
}

void Engine::wake() {
  Poller* poller = nullptr;
  {
    std::lock_guard lock(mutex_);
    poller = blocking_;
  }
  if (poller != nullptr) poller->wake();
}

bool Engine::run_until(const std::function<bool()>& done, Deadline deadline) {
  while (!done()) {
    if (deadline.passed(clock())) return false;
    if (!progress()) block(std::min<int64_t>(deadline.left_us(clock()), kIdleBlockUs));
  }
  return true;
}

bool Engine::wait_until(const std::function<bool()>& done, int64_t timeout_us) {
  const Deadline deadline = Deadline::in_us(clock(), timeout_us);
  std::unique_lock lock(mutex_);
  ++waiters_;
  bool result = true;
  while (!done()) {
    if (deadline.passed(clock())) {
      result = false;
      break;
    }
    if (driving_ || claims_ > 0) {
      // Somebody else works; sleep until an operation ends or the role is free.
      if (driving_) {
        lock.unlock();
        wake();  // a progress thread that sleeps in a poller hands the role over
        lock.lock();
      }
      if (!done() && (driving_ || claims_ > 0)) {
        const int64_t left = std::min<int64_t>(deadline.left_us(clock()), 50'000);
        changed_.wait_until(lock, soon(std::chrono::microseconds(left)));
      }
      continue;
    }
    driving_ = true;
    driver_ = std::this_thread::get_id();
    while (claims_ == 0) {
      lock.unlock();
      bool finished = done() || deadline.passed(clock());
      if (!finished && !progress())
        block(std::min<int64_t>(deadline.left_us(clock()), kIdleBlockUs));
      lock.lock();
      if (finished) break;
    }
    leave_role();
  }
  --waiters_;
  if (waiters_ == 0 && !driving_ && ops_in_flight_ > 0) parked_.notify_one();
  return result;
}

void Engine::progress_thread_main() noexcept {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (!background_due()) {
      parked_.wait_until(lock, soon(kPark));
      continue;
    }
    driving_ = true;
    driver_ = std::this_thread::get_id();
    while (!stop_ && waiters_ == 0) {
      lock.unlock();
      if (!progress()) block(kIdleBlockUs);
      lock.lock();
    }
    driving_ = false;
    changed_.notify_all();
  }
}

Status Engine::test(const OpRef& op) {
  if (!op->done()) {
    bool mine = false;
    {
      std::lock_guard lock(mutex_);
      if (!driving_ && claims_ == 0) {
        driving_ = mine = true;
        driver_ = std::this_thread::get_id();
      }
    }
    if (mine) {
      for (int i = 0; i < 64 && !op->done() && progress(); ++i) {
      }
      std::lock_guard lock(mutex_);
      leave_role();
    }
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
    RoleLock role(*this);
    bool any = progress();
    if (!any && timeout_us > 0) {
      block(timeout_us);
      any = progress();
    }
    // Without a limit; but a thread that wants the role does not wait for it.
    while (!any && timeout_us < 0 && !claimed()) {
      block(kIdleBlockUs);
      any = progress();
    }
    for (int i = 0; i < 64 && progress(); ++i) {
    }
  }
  run_callbacks();
}

bool Engine::claimed() {
  std::lock_guard lock(mutex_);
  return claims_ > 0;
}

void Engine::run_on_driver(std::function<void()> f) {
  std::atomic<bool> ran{false};
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back([&] {
      f();
      ran.store(true, std::memory_order_release);
    });
    inbox_.store(true, std::memory_order_release);
  }
  wake();
  wait_until([&] { return ran.load(std::memory_order_acquire); }, -1);
}

void Engine::run_callbacks() {
  std::vector<OpRef> due;
  {
    std::lock_guard lock(mutex_);
    if (callbacks_.empty()) return;
    due.swap(callbacks_);
  }
  for (const OpRef& op : due) {
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
  const auto room = [&] {
    std::lock_guard lock(mutex_);
    return ops_in_flight_ < options_.max_ops;
  };
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
  op->request_ = std::move(request);
  bool driven = false;
  {
    std::lock_guard lock(mutex_);
    ++ops_in_flight_;
    submitted_.push_back(op);
    inbox_.store(true, std::memory_order_release);
    driven = driving_;
  }
  if (driven) {
    wake();
  } else if (!waits) {
    parked_.notify_one();
  }
  return op;
}

// ---- progress (driver) ----

bool Engine::take_submissions() {
  if (!inbox_.load(std::memory_order_acquire)) return false;
  std::vector<OpRef> ops = std::move(spare_);
  std::vector<std::function<void()>> tasks;
  {
    std::lock_guard lock(mutex_);
    ops.swap(submitted_);
    tasks.swap(tasks_);
    inbox_.store(false, std::memory_order_release);
  }
  for (const OpRef& op : ops) admit(op);
  ops.clear();
  spare_ = std::move(ops);
  for (auto& task : tasks) task();
  if (!tasks.empty()) changed_.notify_all();
  return true;
}

bool Engine::serve_pollers() {
  last_poll_ns_ = clock().now_ns();
  bool any = false;
  for (const auto& backend : backends_) any |= backend->poller().poll(0);
  return any;
}

bool Engine::progress() {
  bool any = take_submissions();
  const bool due = scheduler_.empty() || clock().now_ns() - last_poll_ns_ >= kPollEveryNs;
  if (due) any |= serve_pollers();
  any |= take_completions();
  any |= channels_failed();
  any |= poll_events();
  any |= launches_ended();
  any |= issue_again();
  any |= run_ready();
  any |= take_completions();
  check_deadlines();
  return any;
}

void Engine::block(int64_t wait_us) {
  if (queues_.busy() || !replayed_.empty()) wait_us = std::min(wait_us, kDeviceBlockUs);
  for (const auto& backend : backends_)
    wait_us = std::min(wait_us, backend->poller().patience_us());
  for (const Channel* channel : channels_) {
    if (!channel->ops_.empty())
      wait_us = std::min<int64_t>(wait_us, 20'000);  // deadlines are looked at
  }
  if (blocking_ == nullptr) {
    std::this_thread::yield();
    return;
  }
  blocking_->poll(std::max<int64_t>(wait_us, 0));
  last_poll_ns_ = clock().now_ns();
}

void Engine::check_deadlines() {
  const int64_t now = clock().now_ns();
  if (now < next_deadline_check_ns_) return;
  next_deadline_check_ns_ = now + kDeadlineCheckNs;
  for (Channel* channel : channels_) {
    const auto stall = Scheduler::find_stall(channel->ops_, now);
    if (stall && (!channel->proposed_ || channel->failed()))
      propose_failure(*channel, stall_cause(*channel->ops_[stall->index], stall->stalled_ns));
  }
}

bool Engine::channels_failed() {
  // Every pass comes here: only a failure makes a copy of the list.
  const auto healthy = [](const Channel* c) { return c->pending_failures_.empty(); };
  if (std::all_of(channels_.begin(), channels_.end(), healthy)) return false;
  bool any = false;
  for (Channel* channel : std::vector<Channel*>(channels_)) {
    auto failures = std::move(channel->pending_failures_);
    channel->pending_failures_.clear();
    for (const auto& [cause, decided] : failures) {
      decided ? fail_channel(*channel, cause) : propose_failure(*channel, cause);
      any = true;
    }
  }
  return any;
}

}  // namespace sotto
