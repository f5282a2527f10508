// Captured operations: their calls are part of a graph of the user's, and execute when that is
// launched.
#include "core/engine/executor.h"
#include "core/engine/op_limit.h"

namespace sotto {
namespace {

Status replayable(const Op& op, const Channel& channel) {
  if (!op.captured()) {
    return invalid_state(
        "the operation is no recorded one: its call's stream was not being captured into a CUDA "
        "graph");
  }
  if (!op.done()) {
    return error(Code::kBusy,
                 "the operation is in flight; wait for it, and so for the launch of its graph");
  }
  return channel.failure();
}

}  // namespace

Status Executor::replay(Op& op, const std::function<Status(Run&, OpHooks*)>& bind,
                        uint32_t max_ops) {
  take_inbox();
  Channel& channel = *op.request_.channel;
  SOTTO_TRY(replayable(op, channel));
  if (const Status launched = CapturedOps::check(op, channel.rank()); !launched.ok()) {
    channel.found(launched, channel.rank());
    channels_failed();
    return launched;
  }
  if (role_.ops_in_flight() >= max_ops) return no_room(max_ops);
  Run& run = *op.request_.run;
  // Messages match by their order, and those of a graph come when the caller launches it: so they
  // are never under way together with others. What was called before executes first; issue_groups
  // keeps back what is called later.
  const auto idle = [&] { return channel.failed() || channel.queues_idle(*run.plan); };
  if (!role_.run_until(idle, Deadline::in_us(clock_, op.request_.timeout_us))) {
    return error(Code::kBusy,
                 "operations that were called before still have messages under way; wait for those "
                 "operations");
  }
  SOTTO_TRY(channel.failure());
  SOTTO_TRY(bind(run, op.request_.hooks.get()));
  finish_binding(run);
  op.stats_.launch_ns = op.stats_.start_ns = clock_.now_ns();
  scheduler_.restart(op, op.stats_.start_ns);
  op.stats_.end_ns = 0;
  op.done_.store(false, std::memory_order_release);
  op.request_.totals->in_flight.fetch_add(1, std::memory_order_acq_rel);
  channel.restart(run);
  channel.ops_.push_back(op.self_.lock());
  captured_.await_launch(op);
  channel.await_launch(*run.plan);
  role_.add_op();
  return ok_status();
}

// Of an operation that then completes.
void Executor::forget_replay(Op& op) {
  captured_.forget(op);
  Channel& channel = *op.request_.channel;
  const std::vector<PlanLink>& links = op.request_.run->plan->messages.links;
  for (size_t link = 0; link < links.size(); ++link) {
    if (links[link].stream_ordered && channel.links()[link].groups->launch_ended())
      issue_groups(channel);
  }
}

}  // namespace sotto
