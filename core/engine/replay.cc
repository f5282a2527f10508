// Recorded operations: their calls are part of a graph of the caller's, and execute when that is
// launched. Everything here is done by the driver unless said otherwise.
#include <algorithm>

#include "core/engine/engine.h"

namespace sotto {

// Any thread.
Status Engine::replay(const OpRef& op, const std::function<Status(Run&, OpHooks*)>& bind) {
  RoleLock role(*this);
  take_submissions();
  SOTTO_TRY(check_replay(*op));
  Channel& channel = *op->request_.channel;
  SOTTO_TRY(await_earlier(*op));
  Run& run = *op->request_.run;
  SOTTO_TRY(bind(run, op->request_.hooks.get()));
  finish_binding(run);
  ++op->replays_;
  op->stats_.launch_ns = op->stats_.start_ns = clock().now_ns();
  scheduler_.restart(*op, op->stats_.start_ns);
  op->stats_.end_ns = 0;
  op->done_.store(false, std::memory_order_release);
  op->request_.totals->in_flight.fetch_add(1, std::memory_order_acq_rel);
  if (channel.transport_ != nullptr) {
    for (const OpPosting& posting : run.postings) channel.transport_->restart(posting);
  }
  channel.ops_.push_back(op);
  replayed_.push_back(op.get());
  if (run.plan->stream_ordered) ++channel.replayed_messages_;
  std::lock_guard lock(mutex_);
  ++ops_in_flight_;
  return ok_status();
}

Status Engine::check_replay(const Op& op) {
  if (!op.recorded()) {
    return invalid_state(
        "the operation is no recorded one: its call's stream was not being captured into a CUDA "
        "graph");
  }
  if (!op.done()) {
    return error(Code::kBusy,
                 "the operation is in flight; wait for it, and so for the launch of its graph");
  }
  Channel& channel = *op.request_.channel;
  SOTTO_TRY(channel.failure());
  const uint32_t begun = op.request_.recorder->begun();
  if (begun == op.replays_) {
    std::lock_guard lock(mutex_);
    if (ops_in_flight_ < options_.max_ops) return ok_status();
    return error(Code::kBusy, "{} operations are in flight, the limit of this context",
                 options_.max_ops);
  }
  const Status launched = invalid_state(
      "rank {}: a graph with the operation was launched {} times, but replayed {} times: the "
      "state, error feedback above all, may have changed",
      channel.rank(), begun, op.replays_);
  channel.pending_failures_.push_back({{launched.code(), channel.rank(), launched.text()}, false});
  channels_failed();
  return launched;
}

// Messages match by their order, and those of a graph come when the caller launches it: so they are
// never under way together with others. What was called before executes first; issue_groups keeps
// back what is called later.
Status Engine::await_earlier(const Op& op) {
  if (!op.request_.run->plan->stream_ordered) return ok_status();
  Channel& channel = *op.request_.channel;
  const auto done = [&] {
    return channel.failed() || (channel.groups_.empty() && channel.transport_->idle() &&
                                channel.replayed_messages_ == 0);
  };
  if (run_until(done, Deadline::in_us(clock(), op.request_.timeout_us))) return channel.failure();
  return error(Code::kBusy,
               "operations that were called before still have messages under way; wait for those "
               "operations");
}

bool Engine::launches_ended() {
  if (replayed_.empty()) return false;
  bool any = false;
  for (size_t i = 0; i < replayed_.size();) {
    Op& op = *replayed_[i];
    GraphRecorder& recorder = *op.request_.recorder;
    if (recorder.ended() >= op.replays_ && !op.broken()) {
      launch_ended(op);
      any = true;
      continue;
    }
    ++i;
    if (op.broken()) continue;  // about to fail
    if (const Status health = recorder.health(); !health.ok()) {
      device_failed(op, health);
      any = true;
    }
  }
  return any;
}

// Of an operation that then completes.
void Engine::forget_replay(Op& op) {
  std::erase(replayed_, &op);
  if (!op.request_.run->plan->stream_ordered) return;
  Channel& channel = *op.request_.channel;
  if (--channel.replayed_messages_ == 0) issue_groups(channel);
}

void Engine::launch_ended(Op& op) {
  forget_replay(op);
  op.request_.run->give_up();
  Scheduler::all_done(op);
  finish(op);
}

// What has not begun reads that it is not to commit. What has will end, and tells by its decision
// whether it was whole.
void Engine::fail_replay(Op& op, const Status& status) {
  if (!op.broken() && op.request_.recorder->begun() >= op.replays_) return;
  forget_replay(op);
  complete(op, status);
}

}  // namespace sotto
