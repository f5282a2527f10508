// Running steps.
#include <algorithm>

#include "core/engine/executor.h"
#include "core/engine/launch.h"
#include "core/engine/messages.h"

namespace sotto {
namespace {

// Another operation has steps to issue to the same device. A stream of the user may be blocked
// until that is done: the stream waits for it, or for something that other ranks do after it. So
// lanes wait for a stream only if no such operation needs them. Else steps enter the lanes when the
// stream has come so far. What is kept back until the user lets it go nothing on a stream can wait
// for.
bool another_needs_device(const ChannelList& channels, const Op& op) {
  const auto needs = [&](const OpRef& other) {
    return other.get() != &op && other->queue() == op.queue() &&
           !Scheduler::only_device_left(*other) && !Scheduler::keeps_back(*other);
  };
  return std::ranges::any_of(
      channels, [&](const Channel* c) { return std::ranges::any_of(c->ops(), needs); });
}

}  // namespace

void Executor::admit(const OpRef& ref) {
  Op& op = *ref;
  Channel& channel = *op.request_.channel;
  op.stats_.start_ns = now_ns_;
  scheduler_.admit(op, op.stats_.start_ns);
  channel.ops_.push_back(ref);
  const Status failed = channel.failure();
  if (!failed.ok() && op.request_.after_ops.empty()) {
    complete(op, failed);
    return;
  }
  // Also if it begins later: groups are issued in the order of the calls.
  if (failed.ok()) enter_groups(op);
  if (op.request_.after_ops.empty()) {
    begin(op);
  } else {
    waiting_.push_back(ref);
  }
}

// What it comes after has ended.
void Executor::begin(Op& op) {
  Channel& channel = *op.request_.channel;
  const std::vector<OpRef> after = std::exchange(op.request_.after_ops, {});
  if (!after.empty()) op.stats_.start_ns = clock_.now_ns();  // behind their ends
  if (const Status failed = channel.failure(); !failed.ok()) {
    const auto ended_well = [](const OpRef& before) { return before->status().ok(); };
    const bool waits_only = op.plan().steps.empty() && !after.empty();
    // What only waits for others ends as they have.
    if (waits_only && std::ranges::all_of(after, ended_well)) {
      complete(op, ok_status());
    } else {
      fail_op(op, failed);
    }
    return;
  }
  for (const OpRef& before : after) {
    const Status ended = before->status();
    if (ended.ok()) continue;
    const std::string text = "an operation that this one comes after has failed: " + ended.text();
    // Other ranks do not know how a local operation has ended, or one of another group.
    const bool known =
        before->plan().messages.transfers > 0 && before->request_.channel.get() == &channel;
    if (op.plan().messages.transfers > 0 && !known) {
      const std::string cause = fmt::format("rank {}: {}", channel.rank(), text);
      channel.found(Status(Code::kAborted, cause), channel.rank());
      return;
    }
    channel.drop_groups(op);
    complete(op, Status(ended.code(), text));
    issue_groups(channel);
    return;
  }
  queues_.admit(op, op.device(), op.request_.run->events, op.request_.after);
  Scheduler::set_running(op, op.queue()->asynchronous, now_ns_);
  Run& run = *op.request_.run;
  if (const Status status = channel.post(run); !status.ok()) {
    channel.found(status);
    return;
  }
  if (op.plan().steps.empty()) {
    finish(op);
    return;
  }
  if (op.has_stream() && another_needs_device(channels_, op)) queues_.block(op);
  scheduler_.start(op, poster(op));
  announce_receives(run, *op.request_.ranks, channel.links());
  const size_t inputs = op.plan().awaits.size();
  for (uint32_t input = 0; op.running() && input < inputs; ++input) {
    Run::Arrival& arrival = run.arrivals[input];
    if (arrival.here) open_input(op, input, std::exchange(arrival.event, 0));
  }
  if (op.running() && !op.plan().messages.groups.empty()) issue_groups(channel);
}

void Executor::input_arrived(Op& op, const Handover& item) {
  op.request_.totals->in_flight.fetch_sub(1, std::memory_order_acq_rel);
  const bool queued = op.state() == Op::State::kQueued;
  if (op.done() || !(queued || op.running())) {  // it has failed
    if (item.event != 0) op.device()->release(item.event);
    return;
  }
  bind_input(*op.request_.run, item.input, item.memory);
  if (queued) {
    op.request_.run->arrivals[item.input] = {true, item.event};
    Scheduler::issued(op, op.plan().awaits[item.input]);
    enter_groups(op);
  } else {
    open_input(op, item.input, item.event);
  }
}

// What comes after the input may run: on a device behind the event, if lanes may wait for that,
// else when it is done.
void Executor::open_input(Op& op, uint32_t input, EventId event) {
  const uint32_t step = op.plan().awaits[input];
  if (!op.plan().slice_steps.empty()) {
    op.stats_.kept_back_ns += now_ns_ - Scheduler::keeps_back_since(op, now_ns_);
  }
  Scheduler::issued(op, step);
  if (event != 0) queues_.arrives(op, step, event);
  if (event != 0 && another_needs_device(channels_, op)) {
    Scheduler::hold(op, step);
  } else if (op.asynchronous()) {
    scheduler_.release_behind(op, step, poster(op));
  }
  enter_groups(op);
  if (event == 0) {
    step_done(op, step);
  } else if (!op.plan().messages.groups.empty()) {
    issue_groups(*op.request_.channel);
  }
}

// Groups of an operation enter their queues, and behind the last one of those that come after it.
void Executor::enter_groups(Op& op) {
  op.request_.channel->add_groups(op);
  if (op.plan().awaits.empty()) return;
  for (const OpRef& other : waiting_) other->request_.channel->add_groups(*other);
}

// Fills in the transfer of a message and, on links that match by key, hands it over.
void Executor::post_transfer(Op& op, uint32_t step) {
  Run& run = *op.request_.run;
  Transfer& t = fill_transfer(run, step, *op.request_.ranks);
  t.owner = &op;
  Scheduler::begin(op, step);
  Scheduler::issued(op, step);
  if (trace_ != nullptr) run.note_issue(step, clock_.now_ns());
  const MessageStep& message = *run.plan->steps[step].message();
  MessageTransport* const transport = op.request_.channel->links()[message.lowered.link].messages;
  if (transport == nullptr) return;
  if (t.is_send) {
    transport->send(t);
    return;
  }
  count_receive(run, message);
  transport->recv(t);
}

// What is ready on the channel's links, and on those of others that share the order of one. Behind
// a group that fails none is issued until its channel has failed.
void Executor::issue_groups(Channel& channel) {
  for (const Link& link : channel.links().all()) {
    Channel* of = nullptr;
    const Status status = link.groups->issue_ready([&](const auto& group, auto& transfers) {
      Op& op = static_cast<Op&>(*group.op);
      of = op.request_.channel.get();
      QueueTransport& queue = *of->links()[op.plan().messages.groups[group.index].link].queue;
      return issue(queue, op, group.index, transfers);
    });
    if (!status.ok()) of->found(status);
  }
}

// One group, perhaps not for the first time. Of a stream-ordered link it is a call of a lane like
// others: behind what its messages come after, and with events behind it.
Status Executor::issue(QueueTransport& transport, Op& op, uint32_t group,
                       std::vector<Transfer*>& transfers) {
  Device* device = op.device().get();
  const Plan& plan = *op.request_.run->plan;
  const PlanMessages& messages = plan.messages;
  const std::vector<uint32_t>& steps = messages.groups[group].steps;
  const bool stream_ordered = messages.links[messages.groups[group].link].stream_ordered;
  if (transfers.empty()) {
    for (uint32_t step : steps) {
      post_transfer(op, step);
      transfers.push_back(
          &op.request_.run->transfers[plan.steps[step].message()->lowered.transfer]);
    }
    if (stream_ordered) {
      // Later steps come after more, so that what the earlier ones would wait for is implied.
      for (auto step = steps.rbegin(); step != steps.rend(); ++step)
        SOTTO_TRY(queues_.order(op, *step));
    }
  }
  if (!stream_ordered) return transport.issue(transfers, device, 0);
  SOTTO_TRY(transport.issue(transfers, device, op.lane(plan.steps[steps.front()])));
  for (uint32_t step : steps) after_issue(op, step);
  return ok_status();
}

void Executor::execute(Op& op, uint32_t step) {
  Run& run = *op.request_.run;
  const Step& s = run.plan->steps[step];
  Scheduler::begin(op, step);
  if (trace_ != nullptr) run.note_issue(step, clock_.now_ns());
  const Device& device = *op.device();
  Status status = op.asynchronous() ? queues_.order(op, step) : ok_status();
  if (status.ok()) {
    const uint64_t before = op.asynchronous() ? 0 : device.busy_ns();
    status = launch_step(*op.request_.plan, run, s, op.lane(s), true);
    if (!op.asynchronous()) {
      const auto took = static_cast<int64_t>(device.busy_ns() - before);
      op.stats_.kernel_ns += took;
      now_ns_ += took;
    }
  }
  if (!status.ok()) {
    device_failed(op, status);
    return;
  }
  Scheduler::issued(op, step);
  if (op.asynchronous()) {
    after_issue(op, step);
    if (run.plan->messages.stream_ordered()) issue_groups(*op.request_.channel);
  } else {
    step_done(op, step);
  }
}

// Asynchronous devices: successors on the device may be queued behind the step at once.
void Executor::after_issue(Op& op, uint32_t step) {
  if (const Status status = queues_.issued(op, step); !status.ok()) {
    device_failed(op, status);
    return;
  }
  scheduler_.release_behind(op, step, poster(op));
}

void Executor::device_failed(Op& op, const Status& status) {
  Scheduler::break_off(op);
  Channel& channel = *op.request_.channel;
  channel.found(Status(Code::kDevice, status.text()), channel.rank());
}

void Executor::step_done(Op& op, uint32_t step) {
  Run& run = *op.request_.run;
  const Step& s = run.plan->steps[step];
  if (trace_ != nullptr && !op.capturing() && s.await() == nullptr) {
    const MessageStep* const message = s.message();
    trace_->step(op.request_.channel->rank(), op.sequence(), s,
                 message == nullptr ? -1 : (*op.request_.ranks)[message->peer], op.lane(s),
                 run.issued_ns[step], clock_.now_ns());
  }
  if (scheduler_.done(op, step, now_ns_, poster(op))) {
    finish(op);
    return;
  }
  if (!op.running()) return;
  announce_receives(run, *op.request_.ranks, op.request_.channel->links());
  if (!run.plan->messages.groups.empty()) issue_groups(*op.request_.channel);
}

// A call of a lane has ended; kNoStep: the undo kernels.
void Executor::call_ended(Op& op, uint32_t step, const Status& device) {
  const OpRef keep = op.self_.lock();
  if (!device.ok()) device_failed(op, device);
  if (step == kNoStep) {
    complete(op, op.failure_);
    return;
  }
  const Status expected = check_message(*op.request_.run, step);
  if (expected.ok()) {
    step_done(op, step);
  } else {
    op.request_.channel->found(expected);
  }
  if (op.state() == Op::State::kFailing && !op.done()) settle_failed(op);
}

}  // namespace sotto
