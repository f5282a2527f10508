#include "core/engine/engine.h"

#include <algorithm>

#include "core/base/text.h"
#include "core/engine/executor.h"
#include "core/engine/op_limit.h"

namespace sotto {
namespace {

// Interval at which a poll without limit checks whether a thread wants the role.
constexpr int64_t kPollSliceUs = 200'000;
// How long abort waits for the control plane's decision on the first cause.
constexpr int64_t kDecisionLimitUs = 2'000'000;
// How long a failed comm's connections have to deliver what was decided.
constexpr int64_t kFailedCloseUs = 300'000;
// And its transports to end, beyond what they bound themselves.
constexpr int64_t kSettleLimitUs = 15'000'000;

}  // namespace

// A captured operation uses the run's memory as long as it can be replayed.
Op::~Op() {
  if (!captured() || request_.run == nullptr) return;
  Channel& channel = *request_.channel;
  channel.engine().release_captured(channel, *request_.run);
  request_.plan->give_back(std::move(request_.run));
}

Status Op::status() const {
  if (!done()) return Status(Code::kInProgress, "the operation has not completed");
  return result_;
}

Status Op::outcome() const {
  if (!done() || settled()) return status();
  return Status(Code::kInProgress, "the operation's callback has not returned");
}

OpStats Op::stats() const {
  OpStats stats;
  if (done()) {
    stats = stats_;
    // Threads that wait at the same time stand still once.
    stats.exposed_ns = std::min(waited_ns_.load(), stats.end_ns - stats.launch_ns);
  } else {
    stats.launch_ns = stats_.launch_ns;
    stats.payload_bytes_planned = stats_.payload_bytes_planned;
    stats.header_bytes_planned = stats_.header_bytes_planned;
    stats.exposed_ns = waited_ns_.load();
  }
  if (stream_waits_.load()) stats.exposed_ns = -1;
  return stats;
}

Engine::Engine(EngineOptions options)
    : options_(std::move(options)),
      trace_(options_.trace.empty() ? nullptr : std::make_unique<Trace>(options_.trace)),
      executor_(std::make_unique<Executor>(*options_.clock, role_, trace_.get(), options_.spin_us)),
      role_(*executor_, *options_.clock) {
  if (options_.progress_thread) role_.start_progress_thread(options_.progress_nice);
}

Engine::~Engine() { role_.stop(); }

void Engine::add_backend(std::unique_ptr<Backend> backend, bool blocking) {
  if (executor_->pollers().add(std::move(backend), blocking)) role_.set_serving();
}

Status Engine::test(const OpRef& op) {
  if (!op->done()) {
    role_.try_drive([&] {
      for (int i = 0; i < 64 && !op->done() && executor_->progress(); ++i) {
      }
    });
  }
  run_callbacks();
  return op->outcome();
}

Status Engine::wait(const OpRef& op, int64_t timeout_us) {
  const Deadline deadline = Deadline::in_us(clock(), timeout_us);
  if (!op->done()) {
    const int64_t begin = clock().now_ns();
    wait_until([&] { return op->done(); }, timeout_us);
    op->waited_ns_.fetch_add(clock().now_ns() - begin);
  }
  run_callbacks();
  if (op->done()) await_callback(*op, deadline);
  return op->outcome();
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
  const Deadline deadline = Deadline::in_us(clock(), timeout_us);
  const int64_t begin = clock().now_ns();
  wait_until(any, timeout_us);
  if (found != ops.size()) ops[found]->waited_ns_.fetch_add(clock().now_ns() - begin);
  run_callbacks();
  if (found != ops.size() && await_callback(*ops[found], deadline)) return found;
  return Status(Code::kInProgress, "none of the operations has completed");
}

void Engine::poll(int64_t timeout_us) {
  {
    DriverRole::Lock lock(role_);
    bool any = executor_->progress();
    if (!any && timeout_us > 0) {
      executor_->block(timeout_us);
      any = executor_->progress();
    }
    // Without a limit; but a thread that wants the role does not wait for it.
    while (!any && timeout_us < 0 && !role_.claimed()) {
      executor_->block(kPollSliceUs);
      any = executor_->progress();
    }
    for (int i = 0; i < 64 && executor_->progress(); ++i) {
    }
  }
  run_callbacks();
}

// One at a time, so that a thread that waits for a later one need not wait for this thread's.
void Engine::run_callbacks() {
  while (const OpRef op = role_.take_callback()) {
    op->request_.on_done(op->request_.user, static_cast<int32_t>(op->result_.code()));
    role_.end_callback([&] {
      op->called_.store(true, std::memory_order_release);
      op->request_.totals->callbacks.fetch_sub(1, std::memory_order_acq_rel);
    });
  }
}

bool Engine::await_callback(const Op& op, Deadline deadline) {
  if (op.settled()) return true;
  return wait_until([&] { return op.settled(); },
                    deadline.never() ? -1 : deadline.left_us(clock()));
}

void Engine::finish_callbacks(const OpTotals& totals) {
  poll(0);
  wait_until([&] { return totals.callbacks.load(std::memory_order_acquire) == 0; }, -1);
}

// ---- starting ----

Status Engine::admit(int64_t timeout_us, bool may_block) {
  const auto room = [&] { return role_.ops_in_flight() < options_.max_ops; };
  if (room()) return ok_status();
  const Deadline deadline = Deadline::in_us(clock(), may_block ? timeout_us : 0);
  while (!room()) {
    if (deadline.passed(clock())) return no_room(options_.max_ops);
    poll(1000);
  }
  return ok_status();
}

Result<OpRef> Engine::start(OpRequest request, bool may_block) {
  const auto refused = [&request](Status status) {
    if (request.after != 0) request.plan->device()->release(request.after);
    request.plan->give_back(std::move(request.run));
    return status;
  };
  // A local one that comes after others ends behind them.
  const bool behind_others =
      request.plan->plan().messages.transfers == 0 && !request.after_ops.empty();
  if (Status failed = request.channel->failure(); !failed.ok() && !behind_others)
    return refused(std::move(failed));
  if (!request.admitted) {
    if (const Status full = admit(request.timeout_us, may_block); !full.ok()) return refused(full);
  }
  auto op = pool_->make<Op>();
  op->self_ = op;
  op->stats_.launch_ns = clock().now_ns();
  const PeerTraffic& total = request.plan->plan().traffic.total;
  op->stats_.payload_bytes_planned = total.payload_bytes_sent;
  op->stats_.header_bytes_planned = total.header_bytes_sent + total.metadata_bytes_sent;
  const bool waits = request.waits;
  Scheduler::bind(*op, request.plan->plan(), request.run->steps, request.priority,
                  request.timeout_us);
  CapturedOps::bind(*op, std::move(request.capture));
  const size_t inputs = request.plan->plan().awaits.size();
  if (inputs != 0) op->arrived_ = std::make_unique<std::atomic<bool>[]>(inputs);
  op->request_ = std::move(request);
  OpTotals& totals = *op->request_.totals;
  totals.in_flight.fetch_add(1, std::memory_order_acq_rel);
  if (op->request_.on_done != nullptr) {
    op->called_.store(false, std::memory_order_relaxed);
    totals.callbacks.fetch_add(1, std::memory_order_acq_rel);
  }
  role_.submit(op, waits);
  return op;
}

Status Engine::arrive(const OpRef& op, uint32_t input, EventId event,
                      std::span<void* const> memory) {
  const Plan& plan = op->plan();
  if (input >= plan.awaits.size())
    return invalid_argument("input {} of an operation that has {}", input, plan.awaits.size());
  const size_t slots = plan.steps[plan.awaits[input]].await()->slots.size();
  if (!memory.empty() && memory.size() != slots)
    return invalid_argument("input {} has {}, not {}", input, counted(slots, "tensor"),
                            memory.size());
  if (event != 0 && op->device()->caps().synchronous)
    return invalid_argument("input {}: device {} has no events", input,
                            device_name(op->device()->caps().id));
  // Before the operation is looked at: its comm is not destroyed while any are in flight.
  std::atomic<uint32_t>& in_flight = op->request_.totals->in_flight;
  in_flight.fetch_add(1, std::memory_order_acq_rel);
  const bool ended = op->done();
  if (ended || op->arrived_[input].exchange(true)) {
    in_flight.fetch_sub(1, std::memory_order_acq_rel);
    return ended ? invalid_state("input {}: the operation has ended", input)
                 : invalid_state("input {} has arrived before", input);
  }
  role_.hand_over({op, input, event, {memory.begin(), memory.end()}});
  return ok_status();
}

Status Engine::replay(const OpRef& op, const std::function<Status(Run&, OpHooks*)>& bind) {
  DriverRole::Lock lock(role_);
  return executor_->replay(*op, bind, options_.max_ops);
}

void Engine::trace_span(std::string_view name, int64_t begin_ns, int64_t end_ns) {
  if (trace_ != nullptr) trace_->span(name, begin_ns, end_ns);
}

Status Engine::stream_after(const OpRef& op, void* stream) {
  if (!op->done()) op->stream_waits_.store(true);
  for (;;) {
    StreamOrder order{op.get(), stream};
    {
      const DriverRole::Lock role(role_);
      const bool waits = !options_.block_streams;
      const Status status = executor_->stream_after(order, role.nested(), waits);
      if (status.code() != Code::kInProgress) return status;
    }
    // The operation ends at its deadline, if not before. The stream may be one of this thread's.
    role_.wait_until([&] { return order.done.load(std::memory_order_acquire); }, -1);
  }
}

// ---- channels ----

std::shared_ptr<Channel> Engine::make_channel() {
  const std::shared_ptr<Engine> self = shared_from_this();
  const auto destroy = [self](Channel* channel) {
    self->drive([&](Driver&) {
      self->executor_->channels().remove(*channel);
      delete channel;
    });
  };
  std::shared_ptr<Channel> made;
  drive([&](Driver&) {
    ChannelList& all = executor_->channels();
    made.reset(new Channel(self, executor_->completions(), all.free_number(), all.lane_groups()),
               destroy);
    all.add(*made);
  });
  return made;
}

void Engine::abort(Channel& channel, const FailureCause& cause) {
  role_.run_on_driver([&] { executor_->propose_failure(channel, cause); });
  if (wait_until([&] { return channel.failed(); }, kDecisionLimitUs)) return;
  role_.run_on_driver([&] { executor_->fail_channel(channel, cause); });
}

void Engine::close(Channel& channel, int64_t timeout_us) {
  drive([&](Driver& driver) {
    const int64_t limit = channel.lost() ? std::min(timeout_us, kFailedCloseUs) : timeout_us;
    channel.close(Deadline::in_us(driver.clock(), limit));
    driver.run_until([&] { return channel.settled(); },
                     Deadline::in_us(driver.clock(), limit + kSettleLimitUs));
  });
}

void Engine::release_captured(Channel& channel, const Run& run) {
  drive([&](Driver&) { channel.release_captured(run); });
}

}  // namespace sotto
