// How operations and channels end.
#include <algorithm>
#include <cstring>

#include "core/base/log.h"
#include "core/engine/executor.h"
#include "core/engine/launch.h"

namespace sotto {

// All steps are done, as far as the device says.
void Executor::finish(Op& op) {
  if (op.broken()) return;  // its device has failed; the comm fails first, then this with it
  if (op.capturing()) {
    complete(op, ok_status());
    return;
  }
  const Run& run = *op.request_.run;
  if (run.plan->messages.stream_ordered()) {
    Channel& channel = *op.request_.channel;
    if (const Status meant = channel.verify(run); !meant.ok()) {
      // The comm fails first, then the operation with it.
      Scheduler::break_off(op);
      channel.found(meant);
      return;
    }
  }
  if (const uint32_t verdict = run.plan->decision.verdict; verdict != kNoSlot) {
    uint32_t word = 0;
    std::memcpy(&word, run.bases[verdict], 4);
    if (word != kCommit) {
      op.failure_ = word == kSkipAborted
                        ? op.request_.channel->failure()
                        : error(Code::kNonfinite, "a NaN or Inf was met; nothing was updated");
      start_undo(op, true);
      return;
    }
  }
  complete(op, ok_status());
}

// Takes back what the operation had written, then completes it with failure_.
void Executor::start_undo(Op& op, bool all_ran) {
  const bool launched = Scheduler::undo(op, all_ran, [&](const Step& step, bool paired_ran) {
    const Status status =
        launch_step(*op.request_.plan, *op.request_.run, step, op.lane(step), paired_ran);
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

void Executor::complete(Op& op, Status status) {
  const OpRef keep = op.self_.lock();
  OpRequest& request = op.request_;
  Channel& channel = *request.channel;
  Run& run = *request.run;
  if (op.state() != Op::State::kQueued) channel.complete(run);
  std::erase_if(channel.ops_, [&](const OpRef& other) { return other.get() == &op; });
  op.stats_.end_ns = clock_.now_ns();
  if (trace_ != nullptr && !op.capturing()) {
    trace_->operation(
        channel.rank(), op.sequence(),
        run.descriptors.empty() ? "without messages" : describe(run.descriptors[0].signature),
        op.stats_.launch_ns, op.stats_.end_ns);
  }
  const bool capturing = op.capturing();
  if (capturing) {
    if (const Status ended = CapturedOps::finish(op); status.ok()) status = ended;
    run.abort();  // until it is replayed
  }
  // All of its messages have been through, whatever its owner makes of that.
  const bool whole = status.ok() || status.code() == Code::kNonfinite;
  if (request.hooks != nullptr && !capturing) {
    std::span<const std::byte> verdict;
    const uint32_t slot = run.plan->decision.verdict;
    if (slot != kNoSlot && whole) {
      verdict =
          std::span(static_cast<const std::byte*>(run.bases[slot]), run.plan->slots[slot].bytes);
    }
    request.hooks->on_complete(status, verdict);
  }
  OpTotals& totals = *request.totals;
  if (!capturing && whole) {
    totals.payload_bytes_planned.fetch_add(op.stats_.payload_bytes_planned,
                                           std::memory_order_relaxed);
    totals.header_bytes_planned.fetch_add(op.stats_.header_bytes_planned,
                                          std::memory_order_relaxed);
  }
  totals.kernel_ns.fetch_add(op.stats_.kernel_ns, std::memory_order_relaxed);
  totals.completed.fetch_add(1, std::memory_order_relaxed);
  if (request.hooks != nullptr) request.hooks->add_stats(op.stats_);
  if (request.after != 0) op.device()->release(std::exchange(request.after, 0));
  for (Run::Arrival& arrival : run.arrivals) {
    if (arrival.event != 0) op.device()->release(std::exchange(arrival.event, 0));
  }
  DeviceQueues::unblock_streams(op, *op.device());
  stream_orders_.drop_blocking(op);
  if (!op.captured()) {
    request.plan->give_back(std::move(request.run));
    request.hooks.reset();
  }
  op.result_ = std::move(status);
  if (request.on_done != nullptr && request.done_any_thread) {
    op.done_.store(true, std::memory_order_release);
    request.on_done(request.user, static_cast<int32_t>(op.result_.code()));
    op.called_.store(true, std::memory_order_release);
    totals.callbacks.fetch_sub(1, std::memory_order_acq_rel);
  }
  const bool callback = request.on_done != nullptr && !request.done_any_thread;
  role_.end_op(callback ? keep : nullptr, [&] {
    op.done_.store(true, std::memory_order_release);
    totals.in_flight.fetch_sub(1, std::memory_order_acq_rel);
  });
}

// The cause that this rank has found is a proposal. The control plane decides which one was first,
// so that all ranks report the same, and calls on_control_failure within its own short time.
void Executor::propose_failure(Channel& channel, const FailureCause& cause) {
  if (channel.failed()) {
    // An operation that was being finished nevertheless, and now cannot be.
    for (const OpRef& op : std::vector<OpRef>(channel.ops_)) {
      if (op->broken()) fail_op(*op, Status(cause.code, cause.text));
    }
    return;
  }
  if (const auto first = channel.propose(cause); first.has_value()) fail_channel(channel, *first);
}

void Executor::fail_channel(Channel& channel, const FailureCause& cause) {
  if (!channel.set_failure(cause)) return;
  channel.clear_groups();
  // NCCL ends when its queued calls have executed, and these may be behind a stream that is blocked
  // for one of these operations. So streams are unblocked first, and what is queued behind them
  // executes. The other transports end without the device, and streams are unblocked when it is
  // done with the operation.
  const bool queued = std::ranges::any_of(channel.links().all(), &Link::stream_ordered);
  for (const OpRef& op : channel.ops_) {
    op->request_.run->abort();
    if (queued) DeviceQueues::unblock_streams(*op, *op->device());
  }
  const Status status = channel.failure();
  for (const OpRef& op : std::vector<OpRef>(channel.ops_)) fail_op(*op, status);
  issue_groups(channel);  // those of other root comms, behind what was dropped
}

void Executor::fail_op(Op& op, const Status& status) {
  if (op.done() || op.state() == Op::State::kUndoing || op.state() == Op::State::kFailing) return;
  if (!op.request_.after_ops.empty()) return;  // begin() ends it, behind what it waits for
  if (op.running()) op.request_.channel->cancel(*op.request_.run);
  if (op.replayed()) {
    // A launch that has not begun reads kSkipAborted and does not commit. One that has begun will
    // end, and its decision shows whether it was whole.
    if (!op.broken() && CapturedOps::launch_begun(op)) return;
    forget_replay(op);
    complete(op, status);
    return;
  }
  if (Scheduler::can_finish(op)) {
    if (!op.request_.channel->settled()) {
      op.request_.channel->settling_ = true;
      return;
    }
    // Everything has arrived and verified on this rank, and parameters are being written: the step
    // is finished. Only sends are cut off: those under way, and those whose data the device has not
    // computed yet, which must not reach the transport any more. Receives are done, since a plan
    // decides behind all of them.
    completions_.drop(&op);
    const OpRef keep = op.self_.lock();
    for (const uint32_t step : Scheduler::cut_messages(op)) {
      if (op.done() || !op.running()) return;
      step_done(op, step);
    }
    return;
  }
  if (op.committing() && !op.broken()) {
    log(LogLevel::kError, "operation {} commits without its messages", op.sequence());
    Scheduler::break_off(op);
  }
  queues_.drop_blocked(op);
  queues_.drop_inputs(op);
  completions_.drop(&op);
  scheduler_.fail(op);
  op.failure_ = status;
  queues_.mark(op);
  settle_failed(op);
}

Status Executor::stream_after(StreamOrder& order, bool nested, bool may_wait) {
  now_ns_ = clock_.now_ns();
  Op& op = *order.op;
  if (op.captured()) {
    return invalid_state(
        "the operation is part of a CUDA graph: what is queued behind its launch comes after it");
  }
  Device& device = *op.device();
  SOTTO_TRY(device.check_stream(order.stream));
  // An operation that was just started may need its device alone, once that has its steps. In a
  // callback the driver is in the middle of something.
  if (!nested) {
    take_inbox();
    const DeviceQueue* const queue = op.done() ? nullptr : op.queue();
    const auto same = [&](const ScheduledOp& other) {
      return queue != nullptr && static_cast<const Op&>(other).queue() == queue;
    };
    while (const auto next = scheduler_.pop_of(same))
      execute(static_cast<Op&>(*next->op), next->step);
  }
  if (op.done()) return ok_status();
  if (Scheduler::only_device_left(op)) return DeviceQueues::order_stream(op, order.stream);
  if (!may_wait) {
    SOTTO_TRY(DeviceQueues::block_stream(op, device, order.stream));
    stream_orders_.add_blocking(op);
    return ok_status();
  }
  if (nested) {
    return invalid_state(
        "the host has work left for the operation and cannot wait in a callback; wait for it "
        "behind the callback, or set SOTTO_STREAM_BLOCK=1");
  }
  stream_orders_.add(order);
  return Status(Code::kInProgress, "the stream is not ordered yet");
}

// A failed operation completes when neither the device nor a link works for it any more.
void Executor::settle_failed(Op& op) {
  if (op.done() || op.steps().in_flight > 0) return;
  if (Channel& channel = *op.request_.channel; !channel.settled()) {
    channel.settling_ = true;
    return;
  }
  if (Scheduler::needs_undo(op) && !op.capturing()) {
    start_undo(op, false);
  } else {
    complete(op, op.failure_);
  }
}

}  // namespace sotto
