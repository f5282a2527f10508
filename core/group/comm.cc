#include "core/group/comm.h"

#include <algorithm>
#include <cstring>

#include <nlohmann/json.hpp>

#include "core/base/hash.h"
#include "core/base/json_text.h"
#include "core/base/log.h"
#include "core/base/small_vector.h"
#include "core/base/text.h"
#include "core/group/hosts.h"
#include "core/wire/control.h"

namespace sotto {
namespace {

constexpr size_t kCachedPlans = 64;
// In place of the color of a split; no split has them.
constexpr uint64_t kDuplicateColor = ~uint64_t{0}, kAloneColor = ~uint64_t{1};

uint64_t hash_values(std::span<const uint64_t> values, uint64_t seed) {
  return hash64(values.data(), values.size_bytes(), seed);
}

// null: it has said nothing yet.
nlohmann::ordered_json standing_json(const std::optional<RankStanding>& said, const Clock& clock) {
  if (!said) return nullptr;
  return {{"operations_in_flight", said->in_flight},
          {"operations_completed", said->completed},
          {"ms_ago", (clock.now_ns() - said->at_ns) / 1'000'000}};
}

// Null: there is none, or some ranks are reached by another one.
QueueTransport* native_link(const RootComm& root) {
  const LinkTable& links = root.channel->links();
  return links.all().size() == 1 ? links.all()[0].queue : nullptr;
}

uint64_t chain_of(const OpSignature& s, uint64_t before) {
  OpSignature plain = s;
  plain.chain = 0;
  return hash64(&plain, sizeof plain, before);
}

}  // namespace

OpSignature signature_of(const CollectiveRequest& r, uint64_t tag) {
  OpSignature s;
  s.kind = r.kind;
  s.tag = tag;
  const bool reduces = r.kind == OpKind::kAllReduce || r.kind == OpKind::kReduceScatter ||
                       r.kind == OpKind::kReduceScatterParts || r.kind == OpKind::kReduce;
  s.reduce = reduces ? static_cast<uint16_t>(r.reduce) : uint16_t{0};
  const bool rooted = r.kind == OpKind::kBroadcast || r.kind == OpKind::kGather ||
                      r.kind == OpKind::kScatter || r.kind == OpKind::kReduce;
  s.root = rooted ? r.root : -1;
  SmallVector<uint64_t, 16> shape{r.segment_bytes};
  for (size_t i = 0; i < r.counts.size(); ++i) {
    const auto dtype = static_cast<uint32_t>(r.dtypes[i]);
    s.dtype = i == 0 || s.dtype == dtype ? dtype : 0;
    s.count += r.counts[i];
    shape.push_back(r.counts[i]);
    shape.push_back(dtype);
  }
  // Of unequal parts that are the same on all ranks: where they lie is a rank's own matter.
  if (r.kind == OpKind::kAllGatherParts || r.kind == OpKind::kReduceScatterParts) {
    for (const auto* parts : {&r.in_parts, &r.out_parts}) {
      for (const Range& part : *parts) shape.push_back(part.count);
    }
  }
  s.detail = static_cast<uint32_t>(hash_values(shape, 0));
  return s;
}

RootComm::~RootComm() {
  if (channel == nullptr) return;
  const int64_t limit = std::min<int64_t>(timeout_us < 0 ? 10'000'000 : timeout_us, 10'000'000);
  context->engine()->close(*channel, limit);
  context->engine()->drive([&](Driver&) { standing.detach(); });
}

Comm::Comm(std::shared_ptr<RootComm> root, std::vector<int32_t> ranks, int32_t rank, uint64_t epoch)
    : root_(std::move(root)),
      ranks_(std::make_shared<const std::vector<int32_t>>(std::move(ranks))),
      rank_(rank),
      epoch_(epoch),
      numbering_{0, epoch} {
  Result<Levels> wanted = make_levels(root_->hierarchy, hosts());
  levels_.collectives = wanted.ok() ? wanted.take() : flat_levels(size());
  levels_.exchanges = levels().several() ? levels() : *make_levels(Hierarchy::kAuto, hosts());
  root_->standing.add(epoch_, totals_);
}

Comm::~Comm() {
  if (totals_->in_flight.load(std::memory_order_acquire) > 0) (void)drain();
  LinkTable& links = root_->channel->links();
  if (part_of_ != nullptr) part_of_->end(epoch_, links, *ranks_);
  engine().drive([&](Driver&) {
    links.leave(epoch_);
    root_->standing.remove(epoch_);
  });
}

// ---- starting operations ----

OpDescriptor Comm::next_descriptor(OpSignature signature, int32_t priority) {
  numbering_.chain = chain_of(signature, numbering_.chain);
  signature.chain = numbering_.chain;
  return {{epoch_, numbering_.next++}, signature, priority};
}

OpDescriptor Comm::point_to_point_descriptor(const CollectiveRequest& r, OpSignature signature,
                                             int32_t priority) {
  uint32_t& counter = r.is_send ? sent_to_[r.peer] : received_from_[r.peer];
  const auto source = static_cast<uint32_t>(r.is_send ? rank_ : r.peer);
  const auto destination = static_cast<uint32_t>(r.is_send ? r.peer : rank_);
  signature.chain = chain_of(signature, epoch_);
  return {{epoch_, p2p_number(source, destination, counter++)}, signature, priority};
}

Status Comm::takes(const DeviceCaps& device) const {
  if (device.synchronous || size() == 1) return ok_status();
  for (const Link& link : root_->channel->links().all()) {
    const std::optional<DeviceId> its = link.queue == nullptr ? std::nullopt : link.queue->device();
    if (!its || *its == device.id) continue;
    return invalid_argument(
        "the call is on {}; rank {}'s communicator of {} was made on {}, the device that was "
        "current",
        device_name(device.id), rank(), link.transport->caps().name, device_name(*its));
  }
  return ok_status();
}

Result<std::shared_ptr<PreparedPlan>> Comm::prepare(LogicalPlan logical,
                                                    const std::shared_ptr<Device>& device,
                                                    std::shared_ptr<ScratchPool> scratch) const {
  const LinkTable& table = root_->channel->links();
  const auto is_message = [](const Step& step) { return step.message() != nullptr; };
  if (std::ranges::any_of(logical.steps, is_message)) SOTTO_TRY(takes(device->caps()));
  std::vector<LinkTarget> links;
  for (const Link& link : table.all()) {
    links.push_back({link.queue != nullptr ? Matching::kByOrder : Matching::kByKey,
                     &link.transport->caps(), link.transport.get()});
  }
  std::vector<uint8_t> link_of;
  for (const int32_t rank : *ranks_) link_of.push_back(table.link_of(rank));
  LoweringTarget target;
  target.device = &device->caps();
  target.links = links;
  target.link_of = link_of;
  target.comm_size = size();
  target.channel = root_->channel->number();
  SOTTO_ASSIGN(std::shared_ptr<const Plan> plan, lower(std::move(logical), target));
  return PreparedPlan::make(std::move(plan), device, std::move(scratch));
}

Result<std::shared_ptr<PreparedPlan>> Comm::prepare(std::span<Call> calls) {
  for (Call& call : calls) {
    call.request.segment_bytes = sizes().segment_bytes;
    call.request.held = sizes().held;
    call.request.native = native();
    const bool has_values = call.request.kind != OpKind::kBarrier &&
                            !(call.service && call.request.kind == OpKind::kAllGather);
    call.request.levels = (has_values ? levels_.collectives : levels_.exchanges).of_sums();
  }
  const auto asks_for = [](const CollectiveRequest& request, const Call& call) {
    return request == call.request;
  };
  const std::shared_ptr<Device>& device =
      !calls.empty() && calls[0].device != nullptr ? calls[0].device : context()->device();
  for (auto it = cache_.begin(); it != cache_.end(); ++it) {
    if (it->plan->device() != device ||
        !std::equal(it->requests.begin(), it->requests.end(), calls.begin(), calls.end(), asks_for))
      continue;
    cache_.splice(cache_.begin(), cache_, it);
    return it->plan;
  }
  PlanBuilder builder;
  std::vector<CollectiveRequest> requests;
  bool point_to_point_before = false;
  for (size_t i = 0; i < calls.size(); ++i) {
    requests.push_back(calls[i].request);
    const bool point_to_point = requests[i].kind == OpKind::kSendRecv;
    if (i > 0)
      builder.begin_descriptor(static_cast<uint16_t>(i), point_to_point && point_to_point_before);
    point_to_point_before = point_to_point;
    SOTTO_ASSIGN(const CollectiveSlots slots, emit_collective(builder, requests[i]));
    builder.collective(slots);
  }
  auto scratch = std::ranges::find(scratch_, device, &ScratchPool::device);
  if (scratch == scratch_.end())
    scratch = scratch_.insert(scratch, std::make_shared<ScratchPool>(device));
  SOTTO_ASSIGN(std::shared_ptr<PreparedPlan> plan, prepare(builder.take(), device, *scratch));
  cache_.push_front({std::move(requests), plan});
  if (cache_.size() > kCachedPlans) cache_.pop_back();
  return plan;
}

Result<OpRef> Comm::start(Call call, const CallOptions& options) {
  call.tag = options.tag;
  return start_group({&call, 1}, options);
}

Result<OpRef> Comm::start_group(std::span<Call> calls, const CallOptions& options) {
  SOTTO_TRY(failure());
  SOTTO_ASSIGN(std::shared_ptr<PreparedPlan> plan, prepare(calls));
  SOTTO_ASSIGN(std::unique_ptr<Run> run, plan->acquire());
  const Numbering before = numbering_;
  for (size_t i = 0; i < calls.size(); ++i) {
    const CollectiveSlots& slots = plan->plan().collectives[i];
    std::ranges::copy(calls[i].in, run->bases.begin() + slots.in);
    std::ranges::copy(calls[i].out, run->bases.begin() + slots.out);
    OpSignature signature = signature_of(calls[i].request, calls[i].tag);
    if (calls[i].service) signature.kind = *calls[i].service;
    run->descriptors[i] =
        calls[i].request.kind == OpKind::kSendRecv
            ? point_to_point_descriptor(calls[i].request, signature, options.priority)
            : next_descriptor(signature, options.priority);
  }
  finish_binding(*run);
  Result<OpRef> op =
      caught([&] { return submit(std::move(plan), std::move(run), nullptr, options); });
  if (op.ok()) return op;
  // It did not start, and the next call has its number.
  numbering_ = before;
  for (const Call& call : calls) {
    const CollectiveRequest& r = call.request;
    if (r.kind == OpKind::kSendRecv) --(r.is_send ? sent_to_[r.peer] : received_from_[r.peer]);
  }
  return op;
}

Result<OpRef> Comm::launch(std::shared_ptr<PreparedPlan> plan, OpSignature signature,
                           const std::function<void(Run&)>& bind, std::shared_ptr<OpHooks> hooks,
                           const CallOptions& options, std::shared_ptr<GraphCapture> capture) {
  SOTTO_TRY(failure());
  const auto by_host = [&](const Step& step) { return !on_lane(plan->plan(), step); };
  if (capture != nullptr && std::ranges::any_of(plan->plan().steps, by_host)) {
    return unsupported(
        "over \"{}\" messages are moved by the host, and cannot be part of a CUDA graph; over "
        "\"nccl\" they can",
        transport());
  }
  if (capture != nullptr && !plan->plan().awaits.empty()) {
    return unsupported(
        "inputs that arrive while the operation runs cannot be part of a CUDA graph");
  }
  SOTTO_ASSIGN(std::unique_ptr<Run> run, plan->acquire());
  bind(*run);
  finish_binding(*run);
  const Numbering before = numbering_;
  run->descriptors[0] = next_descriptor(signature, options.priority);
  Result<OpRef> op = caught([&] {
    return submit(std::move(plan), std::move(run), std::move(hooks), options, std::move(capture));
  });
  if (!op.ok() || (*op)->captured()) numbering_ = before;
  return op;
}

Status Comm::replay(const OpRef& op, OpSignature signature,
                    const std::function<Status(Run&, OpHooks*)>& bind) {
  const Numbering before = numbering_;
  Status status = engine().replay(op, [&](Run& run, OpHooks* hooks) {
    SOTTO_TRY(bind(run, hooks));
    OpDescriptor& descriptor = run.descriptors[0];
    signature.tag = descriptor.signature.tag;
    descriptor = next_descriptor(signature, descriptor.priority);
    return ok_status();
  });
  if (!status.ok()) numbering_ = before;
  return status;
}

Result<OpRef> Comm::launch_local(std::shared_ptr<PreparedPlan> plan,
                                 const std::function<void(Run&)>& bind,
                                 std::shared_ptr<OpHooks> hooks, const CallOptions& options) {
  // One that comes after others ends behind them, in a comm that has failed too.
  if (options.after.empty()) SOTTO_TRY(failure());
  SOTTO_ASSIGN(std::unique_ptr<Run> run, plan->acquire());
  bind(*run);
  finish_binding(*run);
  run->descriptors.clear();
  return submit(std::move(plan), std::move(run), std::move(hooks), options);
}

Result<OpRef> Comm::submit(std::shared_ptr<PreparedPlan> plan, std::unique_ptr<Run> run,
                           std::shared_ptr<OpHooks> hooks, const CallOptions& options,
                           std::shared_ptr<GraphCapture> capture) {
  OpRequest request;
  request.plan = std::move(plan);
  request.run = std::move(run);
  request.channel = root_->channel;
  request.ranks = ranks_;
  request.totals = totals_;
  request.hooks = std::move(hooks);
  request.capture = std::move(capture);
  request.after_ops = options.after;
  request.timeout_us = options.timeout_us == 0 ? timeout_us() : options.timeout_us;
  request.priority = options.priority;
  request.on_done = options.on_done;
  request.user = options.user;
  request.done_any_thread = options.done_any_thread;
  request.waits = options.waits;
  request.admitted = options.admitted;
  if (const std::shared_ptr<Device>& device = request.plan->device();
      options.stream && device->caps().streams && request.capture == nullptr) {
    const Status usable = device->check_stream(*options.stream);
    Result<EventId> event = usable.ok() ? device->record_stream(*options.stream) : usable;
    if (!event.ok()) {
      request.plan->give_back(std::move(request.run));
      return event.status();
    }
    request.after = *event;
  }
  return engine().start(std::move(request), !options.no_block);
}

Status Comm::finish(const Result<OpRef>& op) {
  if (!op.ok()) return op.status();
  return engine().wait(*op, -1);
}

Status Comm::run(Call call) {
  CallOptions options;
  options.waits = true;
  return finish(start(std::move(call), options));
}

Result<std::vector<std::string>> Comm::exchange(const std::string& mine, OpKind service) {
  std::string all(mine.size() * static_cast<size_t>(size()), '\0');
  Call call;
  call.service = service;
  call.request.kind = OpKind::kAllGather;
  call.request.rank = rank_;
  call.request.size = size();
  call.request.counts = {mine.size()};
  call.request.dtypes = {Dtype::kU8};
  call.request.in_place = {0};
  call.in = {const_cast<char*>(mine.data())};
  call.out = {all.data()};
  SOTTO_TRY(run(std::move(call)));
  std::vector<std::string> out;
  for (int32_t r = 0; r < size(); ++r)
    out.push_back(all.substr(static_cast<size_t>(r) * mine.size(), mine.size()));
  return out;
}

Status Comm::barrier() {
  Call call;
  call.request.kind = OpKind::kBarrier;
  call.request.rank = rank_;
  call.request.size = size();
  return run(std::move(call));
}

// ---- splitting ----

Result<std::shared_ptr<Comm>> Comm::split(int32_t color, int32_t key) {
  if (color < -1)
    return invalid_argument("color is {}; allowed: 0 and above, or -1 for no comm", color);
  std::string mine(8, '\0');
  std::memcpy(mine.data(), &color, 4);
  std::memcpy(mine.data() + 4, &key, 4);
  SOTTO_ASSIGN(const std::vector<std::string> all, exchange(mine, OpKind::kCommSplit));
  const uint32_t split_number = splits_++;  // one that was refused does not count
  struct Member {
    int32_t key;
    int32_t rank;
  };
  std::vector<Member> members;
  for (int32_t r = 0; r < size(); ++r) {
    int32_t their_color = 0, their_key = 0;
    std::memcpy(&their_color, all[static_cast<size_t>(r)].data(), 4);
    std::memcpy(&their_key, all[static_cast<size_t>(r)].data() + 4, 4);
    if (their_color == color && color >= 0) members.push_back({their_key, r});
  }
  if (color < 0) return std::shared_ptr<Comm>();
  std::stable_sort(members.begin(), members.end(),
                   [](const Member& a, const Member& b) { return a.key < b.key; });
  std::vector<int32_t> ranks;
  int32_t my_rank = -1;
  for (const Member& m : members) {
    if (m.rank == rank_) my_rank = static_cast<int32_t>(ranks.size());
    ranks.push_back((*ranks_)[static_cast<size_t>(m.rank)]);
  }
  const uint64_t values[] = {split_number, static_cast<uint64_t>(color)};
  const std::shared_ptr<Comm> made(
      new Comm(root_, std::move(ranks), my_rank, hash_values(values, epoch_)));
  SOTTO_TRY(made->join(OpKind::kCommSplit));
  const Status levels = make_levels(root_->hierarchy, made->hosts()).status();
  if (!levels.ok() && my_rank == 0)
    log(LogLevel::kWarn, "a comm of {} has one level: {}", counted(made->size(), "rank"),
        levels.text());
  return made;
}

std::shared_ptr<Comm> Comm::duplicate() {
  return make_part(*ranks_, rank_, duplicates_++, kDuplicateColor);
}

std::shared_ptr<Comm> Comm::alone() {
  return make_part({(*ranks_)[static_cast<size_t>(rank_)]}, 0, parts_->made(), kAloneColor);
}

std::shared_ptr<Comm> Comm::make_part(std::vector<int32_t> ranks, int32_t rank, uint64_t number,
                                      uint64_t color) {
  const uint64_t values[] = {number, color};
  std::shared_ptr<Comm> made(new Comm(root_, std::move(ranks), rank, hash_values(values, epoch_)));
  parts_->add(made->epoch_, made->totals_);
  made->part_of_ = parts_;
  return made;
}

// The transport's native collectives between these ranks; all of the root comm, in its order, have
// them already.
Status Comm::join(OpKind service) {
  QueueTransport* const transport = native_link(*root_);
  const NativeCollectives native = transport == nullptr ? 0 : transport->caps().native;
  if (native == 0 || size() == 1) return ok_status();
  if (size() == root_->channel->control()->size() && std::ranges::is_sorted(*ranks_)) {
    native_ = native;
    return ok_status();
  }
  SOTTO_ASSIGN(const std::string mine,
               engine().drive([&](Driver&) { return transport->invite(rank_ == 0); }));
  SOTTO_ASSIGN(const std::vector<std::string> all, exchange(mine, service));
  SOTTO_TRY(engine().drive([&](Driver& driver) {
    const Deadline deadline = Deadline::in_us(driver.clock(), timeout_us());
    return transport->join(epoch_, rank_, all, driver, deadline);
  }));
  native_ = native;
  return ok_status();
}

// ---- end and reports ----

void Comm::abort(const std::string& reason) {
  const int32_t me = (*ranks_)[static_cast<size_t>(rank_)];
  const std::string text = fmt::format("rank {} aborted the group: {}", me, valid_utf8(reason));
  engine().abort(*root_->channel,
                 {Code::kAborted, me, std::string(cut_text(text, wire::kMaxTextBytes)), me});
}

Status Comm::drain() {
  const auto idle = [&] { return totals_->in_flight.load(std::memory_order_acquire) == 0; };
  if (!engine().wait_until(idle, timeout_us())) {
    const int32_t me = (*ranks_)[static_cast<size_t>(rank_)];
    engine().abort(
        *root_->channel,
        {Code::kTimeout, -1,
         fmt::format(
             "rank {}: operations were still in flight {:.1f} s after the comm was destroyed", me,
             static_cast<double>(timeout_us()) * 1e-6)});
    engine().wait_until(idle, -1);
  }
  engine().finish_callbacks(*totals_);
  return failure();
}

std::vector<int32_t> Comm::hosts() const {
  std::vector<uint64_t> numbers;
  for (const int32_t rank : *ranks_) numbers.push_back(root_->hosts[static_cast<size_t>(rank)]);
  return host_indices(numbers);
}

CommCounters Comm::counters() const {
  CommCounters c = parts_->done();
  c.add(*totals_);
  for (int32_t r = 0; r < size(); ++r) {
    if (r != rank_) c.moved += moved((*ranks_)[static_cast<size_t>(r)]);
  }
  return c;
}

TransferCounters Comm::moved(int32_t root_rank) const {
  const LinkTable& links = root_->channel->links();
  TransferCounters c = links.counters(epoch_, root_rank);
  c += parts_->moved(links, root_rank);
  return c;
}

std::string Comm::report_json(const std::string& kind) const {
  nlohmann::ordered_json report;
  const bool all = kind == "all";
  if (all) {
    report["rank"] = rank_;
    report["size"] = size();
    report["transport"] = root_->transport;
    report["segment_bytes"] = sizes().segment_bytes;
    report["timeout_us"] = timeout_us();
    const Status status = failure();
    report["status"] = code_name(status.code());
    report["cause"] = status.text();
    const FailureCause cause = root_->channel->cause();
    report["accused"] = cause.rank;  // ranks of the root comm; -1: not known
    report["reported_by"] = cause.reporter;
  }
  const bool waiting = all || kind == "waiting", routes = all || kind == "routes";
  const LinkTable& links = root_->channel->links();
  std::vector<int64_t> silent(ranks_->size());
  std::vector<nlohmann::ordered_json> standing(ranks_->size());
  std::vector<std::string> route(ranks_->size());
  if (waiting || routes) {
    engine().drive([&](Driver& driver) {  // what was heard, and connections, are the driver's
      for (size_t r = 0; r < silent.size(); ++r) {
        const int32_t root_rank = (*ranks_)[r];
        silent[r] = root_->channel->control()->silent_ms(root_rank);
        if (static_cast<int32_t>(r) == rank_) continue;
        if (routes) route[r] = links.to(root_rank).transport->route(root_rank);
        if (waiting && !all)
          standing[r] = standing_json(root_->standing.ask(epoch_, root_rank), driver.clock());
      }
    });
  }
  const std::vector<int32_t> host_of = hosts();
  if (routes) {
    report["host"] = host_of[static_cast<size_t>(rank_)];
    report["hierarchy"] = hierarchy_name(levels().kind);
    const Status wanted = make_levels(root_->hierarchy, host_of).status();
    if (!wanted.ok()) report["hierarchy_refused"] = wanted.text();
  }
  nlohmann::ordered_json peers = nlohmann::ordered_json::array();
  for (int32_t r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    const int32_t root_rank = (*ranks_)[static_cast<size_t>(r)];
    nlohmann::ordered_json peer{{"rank", r}};
    if (routes) {
      peer["route"] = route[static_cast<size_t>(r)];
      peer["host"] = host_of[static_cast<size_t>(r)];
    }
    if (waiting) peer["silent_ms"] = silent[static_cast<size_t>(r)];
    if (waiting && !all) peer["said"] = standing[static_cast<size_t>(r)];
    if (all || kind == "counters") {
      const TransferCounters c = moved(root_rank);
      peer["payload_bytes_sent"] = c.payload_bytes_sent;
      peer["payload_bytes_received"] = c.payload_bytes_received;
      peer["header_bytes_sent"] = c.header_bytes_sent;
      peer["header_bytes_received"] = c.header_bytes_received;
      peer["messages_sent"] = c.messages_sent;
      peer["messages_received"] = c.messages_received;
      const TransferCounters service = links.counters(0, root_rank);
      peer["service_bytes_sent"] = service.service_bytes_sent;
      peer["service_bytes_received"] = service.service_bytes_received;
    }
    peers.push_back(peer);
  }
  report["peers"] = peers;
  if (waiting) {
    report["operations_in_flight"] = totals_->in_flight.load(std::memory_order_acquire);
    report["operations_completed"] = totals_->completed.load(std::memory_order_acquire);
  }
  return dump_text(report);
}

}  // namespace sotto
