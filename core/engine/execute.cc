// Running steps. Everything here is done by the driver.
#include <algorithm>
#include <array>

#include "core/engine/engine.h"

namespace sotto {
namespace {

constexpr int64_t kRunBudgetNs = 100'000;  // kernels in a row before sockets are looked at again
constexpr size_t kMaxOperands = 16;
#define SOTTO_KERNEL(type, function, family) \
  static_assert(kOperandCount<kernels::type> <= kMaxOperands);
#include "core/kernels/kernels.def"

// PROTOCOL if a message that has arrived is not what its step expects.
Status check_message(const Run& run, uint32_t step) {
  const Step& s = run.plan->steps[step];
  if (s.expected == nullptr) return ok_status();
  const Region& region = s.kind == StepKind::kCopy ? s.destination : s.data;
  const std::span got(static_cast<const std::byte*>(run.at(region)), region.bytes);
  if (std::ranges::equal(got, s.expected->bytes)) return ok_status();
  return Status(Code::kProtocol, s.expected->explain(got));
}

}  // namespace

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
  op.queue_ = queue_of(op.request_.plan->device());
  Scheduler::set_running(op, op.queue_->asynchronous);
  Run& run = *op.request_.run;
  if (channel.transport_ != nullptr) {
    for (const OpPosting& posting : run.postings) {
      if (const Status status = channel.transport_->post_op(posting); !status.ok()) {
        channel.pending_failures_.push_back({{status.code(), -1, status.text()}, false});
        return;
      }
    }
  }
  const Plan& plan = *run.plan;
  if (plan.by_order) {
    for (uint32_t g = 0; g < plan.groups.size(); ++g) {
      if (!plan.groups[g].empty()) channel.groups_.push_back({&op, g});
    }
  }
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
  if (op.request_.after == 0 || !op.queue_->asynchronous) return;
  for (const Channel* channel : channels_) {
    for (const OpRef& other : channel->ops_) {
      if (other.get() == &op || other->queue_ != op.queue_ || Scheduler::only_device_left(*other))
        continue;
      Scheduler::hold(op);
      held_ops_.push_back(&op);
      return;
    }
  }
}

bool Engine::streams_reached() {
  bool any = false;
  for (size_t i = 0; i < held_ops_.size();) {
    Op& op = *held_ops_[i];
    const Result<bool> reached = op.queue_->device->query(op.request_.after);
    if (reached.ok() && !*reached) {
      ++i;
      continue;
    }
    any = true;
    if (!reached.ok()) device_failed(op, reached.status());
    op.ordered_lanes_ = ~0u;
    std::erase(held_ops_, &op);
    scheduler_.let_start(op);
    if (op.request_.run->plan->by_order) issue_groups(*op.request_.channel);
  }
  return any;
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

// by_order: issues whole groups, in order, as long as the first in line is ready, and no launch of
// a graph with others is awaited.
void Engine::issue_groups(Channel& channel) {
  while (!channel.groups_.empty() && channel.replayed_messages_ == 0) {
    const auto [op, index] = channel.groups_.front();
    const Run& run = *op->request_.run;
    if (run.steps.group_pending[index] != 0) return;
    const auto callers = [&](uint32_t step) { return run.plan->steps[step].callers; };
    const std::vector<uint32_t>& steps = run.plan->groups[index];
    // The caller's stream has not come so far: streams_reached comes back.
    if (run.plan->stream_ordered && op->held() && std::any_of(steps.begin(), steps.end(), callers))
      return;
    const Status status = issue(channel, *op, index);
    if (status.code() == Code::kInProgress) return;  // issue_again comes back
    channel.groups_.pop_front();
    channel.issuing_.clear();
    if (!status.ok()) {
      channel.pending_failures_.push_back({{status.code(), -1, status.text()}, false});
      return;
    }
  }
}

// Groups that transports had in progress.
bool Engine::issue_again() {
  bool any = false;
  for (Channel* channel : channels_) {
    if (channel->issuing_.empty() || channel->failed()) continue;
    issue_groups(*channel);
    any |= channel->issuing_.empty();
  }
  return any;
}

// One group, perhaps not for the first time. Of a stream-ordered transport it is a call of a lane
// like others: behind what its messages come after, and with events behind it.
Status Engine::issue(Channel& channel, Op& op, uint32_t group) {
  Device* device = op.queue_->device.get();
  const Plan& plan = *op.request_.run->plan;
  const std::vector<uint32_t>& steps = plan.groups[group];
  if (channel.issuing_.empty()) {
    for (uint32_t step : steps) {
      post_transfer(op, step);
      channel.issuing_.push_back(&op.request_.run->transfers[plan.transfer_index[step]]);
    }
    if (plan.stream_ordered) {
      // Later steps come after more, so that what the earlier ones would wait for is implied.
      for (auto step = steps.rbegin(); step != steps.rend(); ++step)
        SOTTO_TRY(order_lane(op, *step));
    }
  }
  Transport& transport = *channel.transport_;
  if (!plan.stream_ordered) return transport.issue(channel.issuing_, device, 0);
  SOTTO_TRY(transport.issue(channel.issuing_, device, plan.steps[steps.front()].lane));
  for (uint32_t step : steps) after_issue(op, step);
  return ok_status();
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

// All that is ready for one device, and what becomes ready with it; other steps stay.
void Engine::run_ready_on(const DeviceQueue& queue) {
  const auto its = [&](const ScheduledOp& op) {
    return static_cast<const Op&>(op).queue_ == &queue;
  };
  while (const auto next = scheduler_.pop_of(its)) execute(static_cast<Op&>(*next->op), next->step);
}

void Engine::execute(Op& op, uint32_t step) {
  Run& run = *op.request_.run;
  const Step& s = run.plan->steps[step];
  Scheduler::begin(op, step);
  note_issue(run, step);
  DeviceQueue& queue = *op.queue_;
  Status status = queue.asynchronous ? order_lane(op, step) : ok_status();
  if (status.ok()) {
    const uint64_t before = queue.asynchronous ? 0 : queue.device->busy_ns();
    status = launch(op, s, true);
    if (!queue.asynchronous) op.stats_.kernel_ns += queue.device->busy_ns() - before;
  }
  if (!status.ok()) {
    device_failed(op, status);
    return;
  }
  Scheduler::issued(op, step);
  if (queue.asynchronous) {
    after_issue(op, step);
    if (run.plan->stream_ordered) issue_groups(*op.request_.channel);
  } else {
    step_done(op, step);
  }
}

Status Engine::launch(Op& op, const Step& s, bool paired_ran) {
  const Run& run = *op.request_.run;
  Device& device = *op.request_.plan->device();
  const uint32_t* predicate = nullptr;
  if (s.predicate.slot != kNoSlot) {
    predicate = static_cast<const uint32_t*>(run.at({s.predicate.slot, s.predicate.offset, 4}));
  }
  if (s.kind == StepKind::kCopy) {
    return device.copy(s.lane, run.at(s.destination), run.at(s.source), s.source.bytes, predicate,
                       s.predicate.expect);
  }
  // Lists of tensor pointers: where kernels can read them.
  void* const* const lists = run.plan->addresses == kNoSlot
                                 ? run.bases.data()
                                 : static_cast<void* const*>(run.bases[run.plan->addresses]);
  std::array<Operand, kMaxOperands> operands;
  for (size_t i = 0; i < s.operands.size(); ++i) {
    const OperandRef& ref = s.operands[i];
    if (ref.slot == kNoSlot) {
      operands[i].data = nullptr;
    } else if (is_list(ref)) {
      operands[i].data = const_cast<void**>(lists + ref.slot);
    } else {
      operands[i].data = run.at({ref.slot, ref.offset, 0});
    }
  }
  KernelCall call = constant_call(s);
  call.operands = std::span<const Operand>(operands.data(), s.operands.size());
  call.predicate = predicate;
  call.expect = s.predicate.expect;
  call.paired_ran = paired_ran;
  call.tables = op.request_.plan->tables();
  call.call = s.call;
  if (!device.caps().wants_fresh) return device.launch(s.lane, call, {});
  std::vector<Use> uses;
  std::vector<FreshRange> fresh;
  if (predicate == nullptr) {  // a predicated kernel may leave its output as it was
    collect_uses(run.plan->slots, s, &uses);
    for (const Use& use : uses) {
      // In place: what the call also reads is not overwritten blindly.
      const auto also_read = [&](const Use& other) {
        return other.access != Access::kWrite && other.region.slot == use.region.slot &&
               other.region.offset < use.region.offset + use.region.bytes &&
               use.region.offset < other.region.offset + other.region.bytes;
      };
      if (use.access != Access::kWrite || std::any_of(uses.begin(), uses.end(), also_read))
        continue;
      fresh.push_back({run.at(use.region), use.region.bytes});
    }
  }
  return device.launch(s.lane, call, fresh);
}

DeviceQueue* Engine::queue_of(const std::shared_ptr<Device>& device) {
  for (const auto& queue : queues_) {
    if (queue->device == device) return queue.get();
  }
  // Recorders come and go. Of one that nobody else knows nothing is in flight.
  std::erase_if(queues_, [](const auto& queue) { return queue->device.use_count() == 1; });
  return queues_.emplace_back(std::make_unique<DeviceQueue>(device)).get();
}

// Asynchronous devices: the step's lane waits for predecessors that were issued to other lanes,
// unless it comes after them already; and for the caller's stream, before it touches memory that
// work on that stream may use, unless what it comes after did so.
Status Engine::order_lane(Op& op, uint32_t step) {
  const Run& run = *op.request_.run;
  const Step& s = run.plan->steps[step];
  Device& device = *op.queue_->device;
  LaneClock& after = op.queue_->lanes[s.lane].after;
  const uint32_t bit = 1u << s.lane;
  // The latest predecessor of each lane.
  std::array<const StepEvent*, kMaxLanes> latest{};
  for (uint32_t p : run.plan->preds(step)) {
    const Step& before = run.plan->steps[p];
    if (!on_lane(*run.plan, before)) continue;
    const StepEvent& event = run.events[p];
    if (event.ordered) op.ordered_lanes_ |= bit;
    if (before.lane == s.lane || run.steps.progress[p] == StepProgress::kDone ||
        after[before.lane] >= event.before[before.lane])
      continue;
    const StepEvent*& known = latest[before.lane];
    if (known == nullptr || known->before[before.lane] < event.before[before.lane]) known = &event;
  }
  for (size_t lane = 0; lane < latest.size(); ++lane) {
    const StepEvent* event = latest[lane];
    // Or one that comes after it.
    const auto covers = [&](const StepEvent* other) {
      return other != nullptr && other != event && other->before[lane] >= event->before[lane];
    };
    if (event == nullptr || std::any_of(latest.begin(), latest.end(), covers)) continue;
    SOTTO_TRY(device.wait(s.lane, event->id));
    for (size_t k = 0; k < after.size(); ++k) after[k] = std::max(after[k], event->before[k]);
  }
  if (op.request_.after == 0 || !s.callers || (op.ordered_lanes_ & bit) != 0) return ok_status();
  op.ordered_lanes_ |= bit;
  return device.wait(s.lane, op.request_.after);
}

// Asynchronous devices: successors on the device may be queued behind the step at once.
void Engine::after_issue(Op& op, uint32_t step) {
  Run& run = *op.request_.run;
  const Step& s = run.plan->steps[step];
  DeviceQueue::Lane& lane = op.queue_->lanes[s.lane];
  ++lane.after[s.lane];
  EventId event = 0;
  if (run.plan->needs_event[step]) {
    Result<EventId> recorded = op.queue_->device->record(s.lane);
    if (!recorded.ok()) {
      device_failed(op, recorded.status());
    } else {
      event = *recorded;
      run.events[step] = {event, lane.after, (op.ordered_lanes_ >> s.lane & 1) != 0};
    }
  }
  lane.in_flight.push_back({&op, step, event});
  ++run.steps.in_flight;
  // Without its event nothing may follow the step; the operation is about to fail.
  if (event != 0 || !run.plan->needs_event[step]) scheduler_.release_behind(op, step, poster(op));
}

void Engine::device_failed(Op& op, const Status& status) {
  Scheduler::break_off(op);
  Channel& channel = *op.request_.channel;
  channel.pending_failures_.push_back({{Code::kDevice, channel.rank(), status.text()}, false});
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
        op.request_.channel->pending_failures_.push_back(
            {{c.status.code(), c.transfer->peer, c.status.text()}, false});
      }
    }
    completions_now_.clear();
  }
  return true;
}

bool Engine::poll_events() {
  bool any = streams_reached();
  for (size_t q = 0; q < queues_.size(); ++q) {
    if (!queues_[q]->asynchronous) continue;
    for (DeviceQueue::Lane& lane : queues_[q]->lanes) {
      while (lane_advanced(*queues_[q]->device, lane.in_flight)) any = true;
    }
  }
  return any;
}

// Ends the steps up to the first event of a lane, if that is done.
bool Engine::lane_advanced(Device& device, std::deque<InFlight>& lane) {
  const auto marked =
      std::find_if(lane.begin(), lane.end(), [](const InFlight& f) { return f.event != 0; });
  if (marked == lane.end()) return false;
  const Result<bool> ready = device.query(marked->event);
  if (ready.ok() && !*ready) return false;
  const size_t count = static_cast<size_t>(marked - lane.begin()) + 1;
  for (size_t i = 0; i < count; ++i) {
    const InFlight f = lane.front();
    lane.pop_front();
    if (f.event != 0) device.release(f.event);
    Op& op = *f.op;
    const OpRef keep = op.self_.lock();
    if (!ready.ok()) device_failed(op, ready.status());
    if (f.step == kNoStep) {
      complete(op, op.failure_);
      continue;
    }
    --op.steps().in_flight;
    const Status expected = check_message(*op.request_.run, f.step);
    if (expected.ok()) {
      step_done(op, f.step);
    } else {
      op.request_.channel->pending_failures_.push_back(
          {{expected.code(), -1, expected.text()}, false});
    }
    if (op.state() == Op::State::kFailing && !op.done()) settle_failed(op);
  }
  return true;
}

}  // namespace sotto
