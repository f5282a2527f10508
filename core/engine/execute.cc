// Running steps. Everything here is done by the driver.
#include <algorithm>

#include "core/engine/engine.h"
#include "core/engine/launch.h"

namespace sotto {
namespace {}  // namespace

void Engine::admit(const OpRef& ref) {
  Op& op = *ref;
  Channel& channel = *op.request_.channel;
  op.stats_.start_ns = clock().now_ns();
  scheduler_.admit(op, op.stats_.start_ns);
  channel.ops_.push_back(ref);
  if (const Status failed = channel.failure(); !failed.ok()) {
    complete(op, failed);
    return;
  }
  queues_.admit(op, op.device(), op.request_.run->events, op.request_.after);
  Scheduler::set_running(op, op.queue()->asynchronous);
  Run& run = *op.request_.run;
  if (const Status status = channel.post(run); !status.ok()) {
    channel.found(status);
    return;
  }
  const Plan& plan = *run.plan;
  if (plan.by_order) channel.groups_.add(op);
  if (plan.steps.empty()) {
    finish(op);
    return;
  }
  await_stream(op);
  scheduler_.start(op, poster(op));
  announce_receives(op);
  if (plan.by_order) issue_groups(channel);
}

// The caller's stream may stand still until an operation that was started earlier is done: it waits
// for it, or for something that other ranks do after it. So lanes wait for the stream only if no
// such operation needs them; else steps are kept from the lanes until the stream has come so far.
void Engine::await_stream(Op& op) {
  if (!op.has_stream()) return;
  for (const Channel* channel : channels_) {
    for (const OpRef& other : channel->ops_) {
      if (other.get() == &op || other->queue() != op.queue() || Scheduler::only_device_left(*other))
        continue;
      queues_.hold(op);
      return;
    }
  }
}

// Fills in the transfer of a channel step and, for by_key transports, hands it over.
void Engine::post_transfer(Op& op, uint32_t step) {
  Run& run = *op.request_.run;
  const Plan& plan = *run.plan;
  const Step& s = plan.steps[step];
  Transfer& t = run.transfers[plan.transfer_index[step]];
  t = Transfer{};
  t.op = &run.postings[s.posting];
  t.peer = (*op.request_.ranks)[s.peer];
  t.round = s.round;
  t.segment = s.segment;
  t.is_send = s.kind == StepKind::kSend;
  t.message_class = s.message_class;
  t.data = run.at(s.data);
  t.bytes = s.data.bytes;
  if (s.native != nullptr) {
    t.native = &s.native->call;
    t.native_in = run.at(s.native->in);
    t.native_out = run.at(s.native->out);
  }
  t.owner = &op;
  t.step = step;
  Scheduler::begin(op, step);
  Scheduler::issued(op, step);
  note_issue(run, step);
  if (plan.by_order) return;
  Transport& transport = *op.request_.channel->transport_;
  if (t.is_send) {
    transport.send(t);
    return;
  }
  const size_t index = static_cast<size_t>(s.posting) * plan.comm_size + s.peer;
  const auto& rounds = plan.receives[index];
  const auto it =
      std::lower_bound(rounds.begin(), rounds.end(), s.round,
                       [](const RoundReceives& r, uint32_t round) { return r.round < round; });
  run.receives_posted = true;
  ++run.announce[index].posted[static_cast<size_t>(it - rounds.begin())];
  transport.recv(t);
}

// Tells peers for which rounds all receives are posted now.
void Engine::announce_receives(Op& op) {
  Run& run = *op.request_.run;
  const Plan& plan = *run.plan;
  if (!run.receives_posted) return;
  run.receives_posted = false;
  for (size_t index = 0; index < plan.receives.size(); ++index) {
    const auto& rounds = plan.receives[index];
    Run::Announce& a = run.announce[index];
    uint64_t largest = 0;
    bool advanced = false;
    while (a.round_index < rounds.size() &&
           a.posted[a.round_index] == rounds[a.round_index].count) {
      largest = std::max(largest, rounds[a.round_index].largest);
      ++a.round_index;
      advanced = true;
    }
    if (!advanced) continue;
    const size_t posting = index / plan.comm_size;
    op.request_.channel->transport_->ready((*op.request_.ranks)[index % plan.comm_size],
                                           run.postings[posting], rounds[a.round_index - 1].round,
                                           largest);
  }
}

void Engine::issue_groups(Channel& channel) {
  const Status status = channel.groups_.issue_ready([&](const auto& group, auto& transfers) {
    return issue(channel, static_cast<Op&>(*group.op), group.index, transfers);
  });
  if (!status.ok()) channel.found(status);
}

// One group, perhaps not for the first time. Of a stream-ordered transport it is a call of a lane
// like others: behind what its messages come after, and with events behind it.
Status Engine::issue(Channel& channel, Op& op, uint32_t group, std::vector<Transfer*>& transfers) {
  Device* device = op.device().get();
  const Plan& plan = *op.request_.run->plan;
  const std::vector<uint32_t>& steps = plan.groups[group];
  if (transfers.empty()) {
    for (uint32_t step : steps) {
      post_transfer(op, step);
      transfers.push_back(&op.request_.run->transfers[plan.transfer_index[step]]);
    }
    if (plan.stream_ordered) {
      // Later steps come after more, so that what the earlier ones would wait for is implied.
      for (auto step = steps.rbegin(); step != steps.rend(); ++step)
        SOTTO_TRY(queues_.order(op, *step));
    }
  }
  Transport& transport = *channel.transport_;
  if (!plan.stream_ordered) return transport.issue(transfers, device, 0);
  SOTTO_TRY(transport.issue(transfers, device, plan.steps[steps.front()].lane));
  for (uint32_t step : steps) after_issue(op, step);
  return ok_status();
}

// All that is ready for one device, and what becomes ready with it; other steps stay.
void Engine::run_ready_on(const DeviceQueue* queue) {
  const auto its = [&](const ScheduledOp& op) {
    return static_cast<const Op&>(op).queue() == queue;
  };
  while (const auto next = scheduler_.pop_of(its)) execute(static_cast<Op&>(*next->op), next->step);
}

void Engine::execute(Op& op, uint32_t step) {
  Run& run = *op.request_.run;
  const Step& s = run.plan->steps[step];
  Scheduler::begin(op, step);
  note_issue(run, step);
  const Device& device = *op.device();
  Status status = op.asynchronous() ? queues_.order(op, step) : ok_status();
  if (status.ok()) {
    const uint64_t before = op.asynchronous() ? 0 : device.busy_ns();
    status = launch_step(*op.request_.plan, run, s, true);
    if (!op.asynchronous()) op.stats_.kernel_ns += device.busy_ns() - before;
  }
  if (!status.ok()) {
    device_failed(op, status);
    return;
  }
  Scheduler::issued(op, step);
  if (op.asynchronous()) {
    after_issue(op, step);
    if (run.plan->stream_ordered) issue_groups(*op.request_.channel);
  } else {
    step_done(op, step);
  }
}

// Asynchronous devices: successors on the device may be queued behind the step at once.
void Engine::after_issue(Op& op, uint32_t step) {
  if (const Status status = queues_.issued(op, step); !status.ok()) {
    device_failed(op, status);
    return;
  }
  scheduler_.release_behind(op, step, poster(op));
}

void Engine::device_failed(Op& op, const Status& status) {
  Scheduler::break_off(op);
  Channel& channel = *op.request_.channel;
  channel.found(Status(Code::kDevice, status.text()), channel.rank());
}

void Engine::note_issue(Run& run, uint32_t step) {
  if (trace_ == nullptr) return;
  run.issued_ns.resize(run.plan->steps.size());
  run.issued_ns[step] = clock().now_ns();
}

void Engine::step_done(Op& op, uint32_t step) {
  Run& run = *op.request_.run;
  const int64_t now = clock().now_ns();
  if (trace_ != nullptr && !op.recording()) {
    const Step& s = run.plan->steps[step];
    trace_->step(op.request_.channel->rank(), op.sequence(), s,
                 on_device(s) ? -1 : (*op.request_.ranks)[s.peer], run.issued_ns[step], now);
  }
  if (scheduler_.done(op, step, now, poster(op))) {
    finish(op);
    return;
  }
  if (!op.running()) return;
  announce_receives(op);
  if (run.plan->by_order) issue_groups(*op.request_.channel);
}

// A call of a lane has ended; kNoStep: the undo kernels.
void Engine::call_ended(Op& op, uint32_t step, const Status& device) {
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
