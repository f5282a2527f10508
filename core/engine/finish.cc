// How operations and channels end. Everything here is done by the driver unless said otherwise.
#include <algorithm>
#include <cstring>

#include "core/base/log.h"
#include "core/engine/engine.h"
#include "core/engine/launch.h"

namespace sotto {
namespace {

// How long abort waits for the control plane's word on the first cause.
constexpr int64_t kDecisionLimitUs = 2'000'000;
// How long a failed comm's connections have to deliver what was decided.
constexpr int64_t kFailedCloseUs = 300'000;

}  // namespace

// All steps are done, as far as the device says.
void Engine::finish(Op& op) {
  if (op.broken()) return;  // its device has failed; the comm fails first, then this with it
  if (op.recording()) {
    complete(op, ok_status());
    return;
  }
  const Run& run = *op.request_.run;
  if (run.plan->stream_ordered) {
    Channel& channel = *op.request_.channel;
    for (const OpPosting& posting : run.postings) {
      const Status meant = channel.transport_->verify(posting);
      if (meant.ok()) continue;
      // The comm fails first, then the operation with it: who sees this one fail sees that too.
      Scheduler::break_off(op);
      channel.pending_failures_.push_back({{meant.code(), -1, meant.text()}, false});
      return;
    }
  }
  if (run.plan->verdict_slot != kNoSlot) {
    uint32_t word = 0;
    std::memcpy(&word, run.bases[run.plan->verdict_slot], 4);
    if (word != kCommit) {
      op.failure_ = word == kSkipGivenUp
                        ? op.request_.channel->failure()
                        : error(Code::kNonfinite, "a NaN or Inf was met; nothing was updated");
      start_undo(op, true);
      return;
    }
  }
  complete(op, ok_status());
}

// Takes back what the operation had written, then completes it with failure_.
void Engine::start_undo(Op& op, bool all_ran) {
  const bool launched = Scheduler::undo(op, all_ran, [&](const Step& step, bool paired_ran) {
    const Status status = launch_step(*op.request_.plan, *op.request_.run, step, paired_ran);
    if (!status.ok())
      log(LogLevel::kError, "the residual could not be recovered: {}", status.text());
  });
  if (op.asynchronous() && launched) {
    const Status status = queues_.undo_issued(op);
    if (status.ok()) return;
    log(LogLevel::kError, "the residual could not be recovered: {}", status.text());
  }
  complete(op, op.failure_);
}

void Engine::complete(Op& op, Status status) {
  const OpRef keep = op.self_.lock();
  OpRequest& request = op.request_;
  Channel& channel = *request.channel;
  Run& run = *request.run;
  const bool started = op.state() != Op::State::kQueued;
  if (started && channel.transport_ != nullptr && channel.failure().ok()) {
    for (const OpPosting& posting : run.postings) channel.transport_->retire(posting);
  }
  std::erase_if(channel.ops_, [&](const OpRef& other) { return other.get() == &op; });
  op.stats_.end_ns = clock().now_ns();
  if (trace_ != nullptr && !run.postings.empty() && !op.recording())
    trace_->operation(channel.rank(), op.sequence(), describe(run.postings[0].signature),
                      op.stats_.launch_ns, op.stats_.end_ns);
  const bool recording = op.recording();
  if (recording) {
    if (const Status ended = request.recorder->finish(); status.ok()) status = ended;
    run.give_up();  // until it is replayed
  }
  if (request.hooks != nullptr && !recording) {
    std::span<const std::byte> verdict;
    const uint32_t slot = run.plan->verdict_slot;
    if (slot != kNoSlot && (status.ok() || status.code() == Code::kNonfinite)) {
      verdict =
          std::span(static_cast<const std::byte*>(run.bases[slot]), run.plan->slots[slot].bytes);
    }
    request.hooks->on_complete(status, verdict);
  }
  OpTotals& totals = *request.totals;
  if (!recording && (status.ok() || status.code() == Code::kNonfinite)) {
    totals.payload_bytes_planned.fetch_add(op.stats_.payload_bytes_planned,
                                           std::memory_order_relaxed);
    totals.header_bytes_planned.fetch_add(op.stats_.header_bytes_planned,
                                          std::memory_order_relaxed);
  }
  totals.kernel_ns.fetch_add(op.stats_.kernel_ns, std::memory_order_relaxed);
  totals.completed.fetch_add(1, std::memory_order_relaxed);
  if (request.after != 0) op.device()->release(std::exchange(request.after, 0));
  DeviceQueues::let_go(op, *op.device());
  if (!op.recorded()) {
    request.plan->give_back(std::move(request.run));
    request.hooks.reset();
  }
  op.result_ = std::move(status);
  if (request.on_done != nullptr && request.done_any_thread) {
    op.done_.store(true, std::memory_order_release);
    request.on_done(request.user, static_cast<int32_t>(op.result_.code()));
  }
  {
    std::lock_guard lock(mutex_);
    --ops_in_flight_;
    if (request.on_done != nullptr && !request.done_any_thread) callbacks_.push_back(keep);
    totals.in_flight.fetch_sub(1, std::memory_order_acq_rel);
    op.done_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

// What its transfers have reported is no longer of interest.
void Engine::drop_completions(const Op& op) {
  for (auto* list : {&completions_, &completions_now_}) {
    for (Completion& c : *list) {
      if (c.transfer != nullptr && c.transfer->owner == &op) c.transfer = nullptr;
    }
  }
}

// What this rank has found is a proposal: the control plane decides which cause was first, so that
// all ranks report the same one, and answers through on_control_failure within its own short time.
void Engine::propose_failure(Channel& channel, const FailureCause& cause) {
  if (channel.failed()) {
    // An operation that was being finished nevertheless, and now cannot be.
    for (const OpRef& op : std::vector<OpRef>(channel.ops_)) {
      if (op->broken()) fail_op(*op, Status(cause.code, cause.text));
    }
    return;
  }
  if (channel.control_ == nullptr) {
    fail_channel(channel, cause);
    return;
  }
  channel.proposed_ = true;
  channel.control_->fail(cause);
  if (channel.control_->failure().has_value()) fail_channel(channel, *channel.control_->failure());
}

void Engine::fail_channel(Channel& channel, const FailureCause& cause) {
  if (channel.failed()) return;
  {
    std::lock_guard lock(channel.mutex_);
    channel.failure_ = cause;
    channel.failure_.text = cause.whole_text();
  }
  channel.failed_.store(true, std::memory_order_release);
  log(LogLevel::kInfo, "rank {}: the group has failed: {}",
      channel.control_ ? channel.control_->rank() : -1, channel.failure_.text);
  channel.groups_.clear();
  // NCCL ends when what it has queued does, which may stand behind a stream that is held for one of
  // these operations, and what is queued behind it executes. The other transports end without the
  // device, and streams go on when it has done with the operation.
  const bool queued = channel.transport_ != nullptr && channel.transport_->caps().stream_ordered;
  for (const OpRef& op : channel.ops_) {
    op->request_.run->give_up();
    if (queued) DeviceQueues::let_go(*op, *op->device());
  }
  const Status status = channel.failure();
  for (const OpRef& op : std::vector<OpRef>(channel.ops_)) fail_op(*op, status);
}

void Engine::fail_op(Op& op, const Status& status) {
  if (op.done() || op.state() == Op::State::kUndoing || op.state() == Op::State::kFailing) return;
  if (op.running() && op.request_.channel->transport_ != nullptr) {
    for (const OpPosting& posting : op.request_.run->postings)
      op.request_.channel->transport_->cancel(posting);
  }
  if (op.replays_ > 0) {
    fail_replay(op, status);
    return;
  }
  if (Scheduler::can_finish(op)) {
    finish_committing(op);
    return;
  }
  if (op.committing() && !op.broken()) {
    log(LogLevel::kError, "operation {} commits without its messages", op.sequence());
    Scheduler::break_off(op);
  }
  queues_.drop_held(op);
  drop_completions(op);
  scheduler_.fail(op);
  op.failure_ = status;
  queues_.mark(op);
  settle_failed(op);
}

// Everything has arrived and verified on this rank, and parameters are being written: the step is
// finished. Only sends to others are cut off: those under way, and those whose data the device has
// not computed yet, which must not reach the transport any more. Receives are done: a plan decides
// behind all of them.
void Engine::finish_committing(Op& op) {
  drop_completions(op);
  const OpRef keep = op.self_.lock();
  for (const uint32_t step : Scheduler::cut_messages(op)) {
    if (op.done() || !op.running()) return;
    step_done(op, step);
  }
}

Status Engine::stream_after(const OpRef& op, void* stream) {
  RoleLock role(*this);
  if (op->recorded()) {
    return invalid_state(
        "the operation is part of a CUDA graph: what is queued behind its launch comes after it");
  }
  Device& device = *op->device();
  SOTTO_TRY(device.check_stream(stream));
  // An operation that was just started may need its device alone, once that has its steps. In a
  // callback the driver is in the middle of something.
  if (!role.nested()) {
    take_submissions();
    if (!op->done() && op->queue() != nullptr) run_ready_on(op->queue());
  }
  if (op->done()) return ok_status();
  if (Scheduler::only_device_left(*op)) return DeviceQueues::order_stream(*op, stream);
  return DeviceQueues::stand_still(*op, device, stream);
}

// A failed operation completes when the device no longer works for it.
void Engine::settle_failed(Op& op) {
  if (op.steps().in_flight > 0) return;
  if (Scheduler::needs_undo(op) && !op.recording()) {
    start_undo(op, false);
  } else {
    complete(op, op.failure_);
  }
}

FailureCause Engine::stall_cause(const Op& op, int64_t stalled_ns) const {
  const Run& run = *op.request_.run;
  std::string what = "a local operation";
  if (!run.postings.empty()) {
    const OpPosting& posting = run.postings[0];
    what = fmt::format("{} {}", name_of(posting.key), describe(posting.signature));
  }
  struct Peer {
    int32_t root_rank;
    uint32_t sends = 0, receives = 0, came = 0;  // messages: still open; received
  };
  std::vector<Peer> peers;
  bool some_absent = false;  // a peer of which nothing has come at all
  for (int32_t p = 0; p < run.plan->comm_size; ++p) {
    Peer peer{(*op.request_.ranks)[static_cast<size_t>(p)]};
    for (uint32_t i = 0; i < run.plan->steps.size(); ++i) {
      const Step& s = run.plan->steps[i];
      if (on_device(s) || s.peer != p) continue;
      const bool done = run.steps.progress[i] == StepProgress::kDone;
      if (s.kind == StepKind::kSend) {
        if (!done) ++peer.sends;
      } else {
        ++(done ? peer.came : peer.receives);
      }
    }
    if (peer.sends + peer.receives == 0) continue;
    some_absent = some_absent || (peer.receives > 0 && peer.came == 0);
    peers.push_back(peer);
  }
  // Those that have sent something wait themselves, for a rank that has sent nothing.
  if (some_absent)
    std::erase_if(peers, [](const Peer& p) { return p.receives == 0 || p.came > 0; });
  const ControlPlane* control = op.request_.channel->control();
  const int32_t self = control != nullptr ? control->rank() : -1;
  FailureCause cause{Code::kTimeout, self, {}, self};
  for (const Peer& p : peers) {
    if (cause.waits.empty()) cause.rank = p.root_rank;
    cause.waits +=
        fmt::format("{}rank {} ({} messages from it, {} to it, last heard from {} ms ago)",
                    cause.waits.empty() ? "waiting for " : ", ", p.root_rank, p.receives, p.sends,
                    control != nullptr ? control->silent_ms(p.root_rank) : 0);
  }
  if (peers.empty()) cause.waits = "waiting for the local device";
  cause.text = fmt::format("rank {}: {} made no progress for {:.1f} s (limit {:.1f} s)", self, what,
                           static_cast<double>(stalled_ns) * 1e-9,
                           static_cast<double>(op.request_.timeout_us) * 1e-6);
  return cause;
}

// ---- Channel ----

Channel::~Channel() {
  engine_->drive([&](Driver&) {
    engine_->remove_channel(this);
    if (control_ != nullptr) control_->set_listener(nullptr);
    transport_.reset();
    control_.reset();
  });
}

void Channel::attach(std::unique_ptr<ControlPlane> control) {
  control_ = std::move(control);
  control_->set_listener(this);
  engine_->add_channel(this);
}

void Channel::attach(std::unique_ptr<Transport> transport) { transport_ = std::move(transport); }

Status Channel::failure() const {
  const FailureCause first = cause();
  return first.code == Code::kOk ? ok_status() : Status(first.code, first.text);
}

FailureCause Channel::cause() const {
  if (!failed()) return {};
  std::lock_guard lock(mutex_);
  return failure_;
}

void Channel::abort(const FailureCause& cause) {
  engine_->run_on_driver([&] { engine_->propose_failure(*this, cause); });
  if (engine_->wait_until([this] { return failed(); }, kDecisionLimitUs)) return;
  engine_->run_on_driver([&] { engine_->fail_channel(*this, cause); });
}

void Channel::unrecord(const Run& run) {
  engine_->drive([&](Driver&) {
    if (transport_ == nullptr) return;
    for (const OpPosting& posting : run.postings) transport_->unrecord(posting);
  });
}

void Channel::close(int64_t timeout_us) {
  engine_->drive([&](Driver& driver) {
    const bool lost = failed() || (control_ != nullptr && control_->failure().has_value());
    const Deadline deadline =
        Deadline::in_us(driver.clock(), lost ? std::min(timeout_us, kFailedCloseUs) : timeout_us);
    if (control_ != nullptr) control_->set_listener(nullptr);
    if (transport_ != nullptr) transport_->close(deadline);
    if (control_ != nullptr) control_->leave(deadline);
  });
}

void Channel::on_transfer(Transfer& transfer, Status status) noexcept {
  engine_->completions_.push_back({&transfer, std::move(status)});
}

void Channel::on_failure(int32_t peer, Status status) noexcept {
  pending_failures_.push_back({{status.code(), peer, status.text()}, false});
}

void Channel::on_control_failure(const FailureCause& cause) noexcept {
  pending_failures_.push_back({cause, true});
}

}  // namespace sotto
