#include "transports/nccl/nccl_transport.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/base/log.h"
#include "core/iface/device.h"
#include "core/kernels/call.h"
#include "cuda/calls/cuda_calls.h"

namespace sotto::nccl {
namespace {

constexpr int64_t kWatchNs = 20'000'000;  // between looks at NCCL's asynchronous error
// Time for the control plane to name a lost rank, which NCCL does not.
constexpr int64_t kNameTheRankNs = 1'000'000'000;
constexpr int64_t kDrainLimitUs = 10'000'000;
constexpr auto kDrainPause = std::chrono::microseconds(100);
constexpr auto kEndPause = std::chrono::microseconds(20);
constexpr uint64_t kGroupsAtOnce = 128;  // groups with memory for their headers from the start

ncclDataType_t type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kI8: return ncclInt8;
    case Dtype::kI32: return ncclInt32;
    case Dtype::kI64: return ncclInt64;
    case Dtype::kU8: return ncclUint8;
    case Dtype::kU32: return ncclUint32;
    case Dtype::kU64: return ncclUint64;
    // NCCL has no 16-bit integers; what is only moved is 16 bits of anything.
    case Dtype::kI16:
    case Dtype::kU16:
    case Dtype::kF16: return ncclFloat16;
    case Dtype::kF32: return ncclFloat32;
    case Dtype::kF64: return ncclFloat64;
    case Dtype::kBF16: return ncclBfloat16;
  }
  return ncclNumTypes;  // refused by NCCL
}

ncclRedOp_t op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return ncclSum;
    case ReduceOp::kMean: return ncclAvg;
    case ReduceOp::kMin: return ncclMin;
    case ReduceOp::kMax: return ncclMax;
    case ReduceOp::kProd: return ncclProd;
    case ReduceOp::kBitOr: break;  // NCCL has none
  }
  return ncclNumOps;  // refused by NCCL
}

}  // namespace

Result<std::unique_ptr<NcclTransport>> NcclTransport::make(
    std::unique_ptr<Communicator> communicator, std::shared_ptr<NcclPoller> poller,
    const ControlPlane& control, TransferSink& sink, const Clock& clock,
    const NcclOptions& options) {
  std::unique_ptr<NcclTransport> made(
      new NcclTransport(std::move(communicator), std::move(poller), control, sink, clock, options));
  const OnDevice on(made->communicator_->device());
  SOTTO_TRY(on.status());
  int lowest = 0, highest = 0;
  SOTTO_TRY(cuda_status(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
                        "cudaDeviceGetStreamPriorityRange"));
  SOTTO_TRY(
      cuda_status(cudaStreamCreateWithPriority(&made->stream_, cudaStreamNonBlocking, highest),
                  "cudaStreamCreateWithPriority"));
  SOTTO_TRY(made->pinned_.reserve(made->headers_bytes(), kGroupsAtOnce));
  return made;
}

NcclTransport::NcclTransport(std::unique_ptr<Communicator> communicator,
                             std::shared_ptr<NcclPoller> poller, const ControlPlane& control,
                             TransferSink& sink, const Clock& clock, const NcclOptions& options)
    : communicator_(std::move(communicator)),
      poller_(std::move(poller)),
      control_(control),
      rank_(control.rank()),
      size_(control.size()),
      sink_(sink),
      clock_(clock),
      caps_{.name = "nccl",
            .host_memory_only = false,
            // A group costs some 10 us to launch, a MiB 20 us at 50 GB/s.
            .segment_bytes = 1 << 20,
            .stream_ordered = true,
            .native = options.native},
      pinned_(communicator_->device()),
      events_(communicator_->device()) {
  poller_->add(this);
}

NcclTransport::~NcclTransport() {
  poller_->remove(this);
  if (!groups_.empty()) stop();
  if (stream_ == nullptr) return;
  const OnDevice on(communicator_->device());
  (void)cudaStreamDestroy(stream_);
}

Status NcclTransport::closed() {
  return error(Code::kTransport, "nccl: the communicator has failed or is closed");
}

// ---- Issuing ----

// Called again with the same transfers as long as it is in progress.
Status NcclTransport::issue(std::span<Transfer* const> transfers, Device* device, uint32_t lane) {
  if (failed_ || !communicator_->open()) return closed();
  if (transfers.empty()) return ok_status();
  if (remote_error_ns_ != 0) return rank_is_gone();
  const OnDevice on(communicator_->device());
  SOTTO_TRY(on.status());
  Status status;
  if (groups_.empty() || groups_.back().stage == QueueStage::kQueued) {
    SOTTO_ASSIGN(const cudaStream_t stream, stream_of(*device, lane));
    MessageGroup& made = new_group(stream);
    made.reports = device->caps().synchronous;
    if (device->caps().records) made.recorded = transfers.front()->op;
    status = prepare(transfers, &made);
  }
  MessageGroup& group = groups_.back();
  if (status.ok()) status = launch(group);
  if (status.code() == Code::kInProgress) return status;
  if (!status.ok()) {
    // What NCCL has queued may still use the memory: the group ends with the communicator.
    if (status.code() == Code::kPeerLost) {
      remote_error_ns_ = clock_.now_ns();
      return rank_is_gone();
    }
    failed_ = true;
    return status;
  }
  if (group.recorded != nullptr) {
    recorded_.splice(recorded_.end(), groups_, std::prev(groups_.end()));
    return ok_status();
  }
  for (const PeerHeader& header : group.headers) count_header(header.peer, true);
  if (!group.reports) {
    for (const Transfer* t : transfers) count(*t);
    group.transfers.clear();  // the engine may use them again before this group is seen to be done
  }
  last_stream_ = group.stream;
  last_event_ = group.event;
  return ok_status();
}

// The control plane names the lost rank; if it does not in time, watch() fails the comm.
Status NcclTransport::rank_is_gone() {
  return Status(Code::kInProgress, "nccl: a rank is gone, and is about to be named");
}

Result<cudaStream_t> NcclTransport::stream_of(Device& device, uint32_t lane) const {
  const DeviceCaps& caps = device.caps();
  if (caps.synchronous) return stream_;
  SOTTO_ASSIGN(void* const queue, device.lane_stream(lane));
  const auto stream = static_cast<cudaStream_t>(queue);
  if (caps.id.type == DeviceType::kCuda && caps.id.index == communicator_->device() &&
      stream != nullptr)
    return stream;
  return invalid_argument(
      "nccl: the operation is on {}, but the communicator was made on cuda:{}, the device that was "
      "current",
      device_name(caps.id), communicator_->device());
}

// With the memory of one that is complete, so that nothing is allocated in steady state.
NcclTransport::MessageGroup& NcclTransport::new_group(cudaStream_t stream) {
  if (spare_.empty()) spare_.emplace_back();
  groups_.splice(groups_.end(), spare_, spare_.begin());
  MessageGroup& group = groups_.back();
  group.stream = stream;
  group.keys.clear();
  group.transfers.clear();
  group.messages.clear();
  group.natives.clear();
  group.natives_on = nullptr;
  group.staged.clear();
  group.headers.clear();
  group.header_memory = nullptr;
  group.event = nullptr;
  group.stage = QueueStage::kNew;
  group.recorded = nullptr;
  group.executing = false;
  return group;
}

Status NcclTransport::prepare(std::span<Transfer* const> transfers, MessageGroup* group) {
  group->transfers.assign(transfers.begin(), transfers.end());
  for (const Transfer* t : transfers) {
    if (group->keys.empty() || !(group->keys.back() == t->op->key))
      group->keys.push_back(t->op->key);
    if (t->peer < 0 || t->peer >= size_ || t->peer == rank_) {
      return error(Code::kInternal, "nccl: message of rank {} to or from rank {} of {}", rank_,
                   t->peer, size_);
    }
    SOTTO_TRY(add_header(t->peer, transfers, group));
    if (t->native == nullptr) {
      SOTTO_ASSIGN(const Action action, message(*t, group));
      group->messages.push_back(action);
    } else if (group->natives.empty() || group->natives.back().transfer->native != t->native) {
      group->natives_on = &communicator_of(t->op->key.comm);  // one group is of one comm
      SOTTO_ASSIGN(const Action action, native(*t, group));
      group->natives.push_back(action);
    }
  }
  if (group->recorded != nullptr) return ok_status();
  SOTTO_ASSIGN(group->event, events_.take());
  return ok_status();
}

Status NcclTransport::add_header(int32_t peer, std::span<Transfer* const> transfers,
                                 MessageGroup* group) {
  const auto same = [&](const PeerHeader& h) { return h.peer == peer; };
  if (std::any_of(group->headers.begin(), group->headers.end(), same)) return ok_status();
  if (group->header_memory == nullptr) {
    SOTTO_ASSIGN(group->header_memory, pinned_.take(headers_bytes()));
  }
  std::byte* const both = group->header_memory + 2 * sizeof(GroupHeader) * group->headers.size();
  group->headers.push_back(
      {peer, make_group_header(transfers, peer), both, both + sizeof(GroupHeader), {}, false});
  write_header(group->headers.back());
  return ok_status();
}

void NcclTransport::write_header(const PeerHeader& header) {
  std::memcpy(header.out, &header.mine, sizeof(GroupHeader));
  std::memset(header.in, 0, sizeof(GroupHeader));
}

Result<NcclTransport::Action> NcclTransport::message(const Transfer& t, MessageGroup* group) {
  SOTTO_ASSIGN(void* const memory, reachable(t.data, t.bytes, !t.is_send, group));
  return Action{&t, memory};
}

Result<NcclTransport::Action> NcclTransport::native(const Transfer& t, MessageGroup* group) {
  const NativeCall& call = *t.native;
  const uint64_t bytes = call.count * dtype_bytes(call.dtype);
  const auto ranks = static_cast<uint64_t>(group->natives_on->size());
  const uint64_t in_bytes = call.kind == OpKind::kReduceScatter ? bytes * ranks : bytes;
  const uint64_t out_bytes = call.kind == OpKind::kAllGather ? bytes * ranks : bytes;
  Action action{&t};
  SOTTO_ASSIGN(action.out, reachable(t.native_out, out_bytes, true, group));
  action.in = action.out;
  if (call.kind == OpKind::kBroadcast && call.root != group->natives_on->rank())
    return action;  // it has no input
  SOTTO_ASSIGN(action.in, reachable(const_cast<void*>(t.native_in), in_bytes, false, group));
  return action;
}

// Where NCCL can read or write for the caller's memory. What is to be sent is there on return.
Result<void*> NcclTransport::reachable(void* memory, uint64_t bytes, bool received,
                                       MessageGroup* group) {
  if (bytes == 0) return memory;
  cudaPointerAttributes at{};
  SOTTO_TRY(cuda_status(cudaPointerGetAttributes(&at, memory), "cudaPointerGetAttributes"));
  switch (at.type) {
    case cudaMemoryTypeHost:
    case cudaMemoryTypeManaged: return memory;
    case cudaMemoryTypeDevice:
      if (at.device == communicator_->device()) return memory;
      return invalid_argument(
          "nccl: memory is on cuda:{}, but the communicator was made on cuda:{}, the device that "
          "was current",
          at.device, communicator_->device());
    case cudaMemoryTypeUnregistered: break;
  }
  if (group->recorded != nullptr)
    return error(Code::kInternal, "nccl: memory in a graph that NCCL cannot reach");
  SOTTO_ASSIGN(std::byte* const pinned, pinned_.take(bytes));
  group->staged.push_back({memory, pinned, bytes, received});
  if (!received) std::memcpy(pinned, memory, bytes);
  return static_cast<void*>(pinned);
}

// As far as NCCL is ready for it; IN_PROGRESS: it is to be called again. Headers come with the
// messages. In front of native collectives they have a group of their own, so that they are seen
// also if the collectives hang.
Status NcclTransport::launch(MessageGroup& group) {
  constexpr char kCall[] = "ncclGroupEnd";
  if (group.stage == QueueStage::kNew) {
    // What is captured cannot wait for what is not; NCCL itself orders launches of graphs with it.
    if (last_event_ != nullptr && last_stream_ != group.stream && group.recorded == nullptr)
      SOTTO_TRY(
          cuda_status(cudaStreamWaitEvent(group.stream, last_event_, 0), "cudaStreamWaitEvent"));
    SOTTO_TRY(together(group, *communicator_, &NcclTransport::queue_messages));
    group.stage = QueueStage::kMessages;
  }
  if (group.stage == QueueStage::kMessages) {
    SOTTO_TRY(communicator_->state(kCall));
    if (group.natives_on != nullptr) {
      SOTTO_TRY(together(group, *group.natives_on, &NcclTransport::queue_natives));
    }
    group.stage = QueueStage::kNatives;
  }
  if (group.natives_on != nullptr) SOTTO_TRY(group.natives_on->state(kCall));
  // Not before: until then NCCL may have put nothing on the stream.
  if (group.recorded == nullptr)
    SOTTO_TRY(cuda_status(cudaEventRecord(group.event, group.stream), "cudaEventRecord"));
  group.stage = QueueStage::kQueued;
  return ok_status();
}

Status NcclTransport::together(const MessageGroup& group, const Communicator& on,
                               Status (NcclTransport::*queue)(const MessageGroup&) const) const {
  const Api& api = communicator_->api();
  SOTTO_TRY(api.status(api.GroupStart(), "ncclGroupStart", nullptr));
  const Status status = (this->*queue)(group);
  const ncclResult_t ended = api.GroupEnd();  // also after an error: groups are balanced
  SOTTO_TRY(status);
  return on.queued(ended, "ncclGroupEnd");
}

// Of two ranks' calls that belong together the i-th send meets the i-th receive, so both have their
// headers first, then the messages in the order of the plan.
Status NcclTransport::queue_messages(const MessageGroup& group) const {
  const Communicator& on = *communicator_;
  const Api& api = on.api();
  const ncclComm_t comm = on.handle();
  for (const PeerHeader& h : group.headers) {
    SOTTO_TRY(on.queued(api.Send(h.out, sizeof(GroupHeader), ncclUint8, h.peer, comm, group.stream),
                        "ncclSend"));
    SOTTO_TRY(on.queued(api.Recv(h.in, sizeof(GroupHeader), ncclUint8, h.peer, comm, group.stream),
                        "ncclRecv"));
  }
  for (const Action& a : group.messages) {
    const Transfer& t = *a.transfer;
    if (t.bytes == 0) continue;
    SOTTO_TRY(t.is_send ? on.queued(api.Send(a.in, t.bytes, ncclUint8, t.peer, comm, group.stream),
                                    "ncclSend")
                        : on.queued(api.Recv(a.in, t.bytes, ncclUint8, t.peer, comm, group.stream),
                                    "ncclRecv"));
  }
  return ok_status();
}

Status NcclTransport::queue_natives(const MessageGroup& group) const {
  const Communicator& on = *group.natives_on;
  const Api& api = on.api();
  const ncclComm_t comm = on.handle();
  const cudaStream_t stream = group.stream;
  for (const Action& a : group.natives) {
    const NativeCall& c = *a.transfer->native;
    const ncclDataType_t type = type_of(c.dtype);
    switch (c.kind) {
      case OpKind::kAllGather:
        SOTTO_TRY(
            on.queued(api.AllGather(a.in, a.out, c.count, type, comm, stream), "ncclAllGather"));
        break;
      case OpKind::kBroadcast:
        SOTTO_TRY(on.queued(api.Broadcast(a.in, a.out, c.count, type, c.root, comm, stream),
                            "ncclBroadcast"));
        break;
      case OpKind::kReduceScatter:
        SOTTO_TRY(
            on.queued(api.ReduceScatter(a.in, a.out, c.count, type, op_of(c.reduce), comm, stream),
                      "ncclReduceScatter"));
        break;
      case OpKind::kAllReduce:
        SOTTO_TRY(
            on.queued(api.AllReduce(a.in, a.out, c.count, type, op_of(c.reduce), comm, stream),
                      "ncclAllReduce"));
        break;
      default: return error(Code::kInternal, "nccl has no collective of this kind");
    }
  }
  return ok_status();
}

// ---- Progress ----

bool NcclTransport::run() {
  if (failed_ || !communicator_->open()) return false;
  const OnDevice on(communicator_->device());
  if (!on.status().ok()) {
    fail(-1, on.status());
    return true;
  }
  bool any = false;
  while (!groups_.empty() && groups_.front().stage == QueueStage::kQueued) {
    MessageGroup& first = groups_.front();
    const cudaError_t state = cudaEventQuery(first.event);
    if (state == cudaErrorNotReady) {
      (void)cudaGetLastError();
      break;
    }
    if (state != cudaSuccess) {
      fail(-1, cuda_status(state, "cudaEventQuery behind a group of nccl"));
      return true;
    }
    if (const PeerHeader* differs = check_headers(first); differs != nullptr) {
      fail(differs->peer, differs->meant);
      return true;
    }
    complete(first);
    spare_.splice(spare_.begin(), groups_, groups_.begin());
    any = true;
  }
  const int64_t now = clock_.now_ns();
  if (now < next_watch_ns_) return any;
  next_watch_ns_ = now + kWatchNs;
  watch();
  return any || failed_;
}

// Null: nothing of what has arrived is meant for something else.
const NcclTransport::PeerHeader* NcclTransport::check_headers(MessageGroup& group) {
  for (PeerHeader& header : group.headers) {
    GroupHeader theirs;
    if (!header.seen && has_arrived(header.in, &theirs)) {
      header.seen = true;
      header.meant = compare(header.mine, rank_, theirs, header.peer);
    }
    if (!header.meant.ok()) return &header;
  }
  return nullptr;
}

// The device has executed the group, and so all of it has arrived: NCCL holds up its stream until
// then or its abort.
void NcclTransport::complete(MessageGroup& group) {
  if (last_event_ == group.event) last_event_ = nullptr;
  for (const Staged& s : group.staged) {
    if (s.received) std::memcpy(s.memory, s.at, s.bytes);
  }
  bool all_seen = true;
  for (const PeerHeader& header : group.headers) {
    count_header(header.peer, false);
    all_seen = all_seen && header.seen;
  }
  release(group);
  if (!all_seen) {
    fail(-1, missing_group_header());
    return;
  }
  for (Transfer* t : group.transfers) {
    count(*t);
    sink_.on_transfer(*t, ok_status());
  }
}

bool NcclTransport::busy() const {
  return !groups_.empty() || std::any_of(recorded_.begin(), recorded_.end(),
                                         [](const MessageGroup& group) { return group.executing; });
}

void NcclTransport::release(MessageGroup& group) {
  for (const Staged& s : group.staged) pinned_.give_back(s.at);
  if (group.header_memory != nullptr) pinned_.give_back(group.header_memory);
  if (group.event != nullptr) events_.give_back(group.event);
}

// Differences that make operations hang, and errors of NCCL.
void NcclTransport::watch() {
  for (std::list<MessageGroup>* groups : {&groups_, &recorded_}) {
    for (MessageGroup& group : *groups) {
      if (group.recorded != nullptr && !group.executing) continue;
      if (const PeerHeader* differs = check_headers(group); differs != nullptr) {
        fail(differs->peer, differs->meant);
        return;
      }
    }
  }
  std::erase_if(ending_, [](const auto& ending) { return ending->ended(); });
  const Status state = check_communicators();
  if (state.ok()) return;
  const int64_t now = clock_.now_ns();
  if (state.code() == Code::kPeerLost) {
    if (remote_error_ns_ == 0) remote_error_ns_ = now;
    if (now - remote_error_ns_ < kNameTheRankNs) return;
  }
  fail(-1, state.with_prefix(fmt::format("rank {}", rank_)));
}

// ---- Ends ----

void NcclTransport::fail(int32_t peer, const Status& status) {
  if (std::exchange(failed_, true)) return;
  sink_.on_failure(peer, status);
}

// Ends what is in flight; nothing is touched any more on return.
void NcclTransport::stop() {
  const OnDevice on(communicator_->device());
  failed_ = true;
  abort_communicators();
  const Deadline deadline = Deadline::in_us(clock_, kDrainLimitUs);
  const auto working = [](const MessageGroup& group) {
    if (group.recorded != nullptr) return false;  // it executes nothing
    const cudaError_t state = group.stage == QueueStage::kQueued ? cudaEventQuery(group.event)
                                                                 : cudaStreamQuery(group.stream);
    return state == cudaErrorNotReady;
  };
  while (std::any_of(groups_.begin(), groups_.end(), working)) {
    (void)cudaGetLastError();
    if (deadline.passed(clock_)) {
      log(LogLevel::kError, "nccl: the device still works for an aborted communicator after {} s",
          kDrainLimitUs / 1'000'000);
      break;
    }
    std::this_thread::sleep_for(kDrainPause);
  }
  for (MessageGroup& group : groups_) {
    // An operation that had all its messages before is asked about later.
    if (const PeerHeader* differs = check_headers(group); differs != nullptr)
      for (const OpKey& key : group.keys) differing_.emplace_back(key, differs->meant);
    release(group);
  }
  groups_.clear();
  last_event_ = nullptr;
}

// An aborted communicator is of no more use, so everything in flight ends, not this operation's
// alone.
void NcclTransport::cancel(const OpPosting&) {
  if (communicator_->open() || !groups_.empty()) stop();
}

void NcclTransport::close(Deadline deadline) {
  while (!groups_.empty() && !failed_ && !deadline.passed(clock_)) {
    if (!run()) std::this_thread::sleep_for(kDrainPause);
  }
  if (!groups_.empty() || failed_) {
    stop();
    return;
  }
  std::vector<Communicator*> ending{communicator_.get()};
  for (const auto& [comm, joined] : joined_) ending.push_back(joined.get());
  for (Communicator* communicator : ending) communicator->end();
  for (const auto& before : ending_) ending.push_back(before.get());
  const auto ended = [](Communicator* communicator) { return communicator->ended(); };
  while (std::erase_if(ending, ended), !ending.empty() && !deadline.passed(clock_))
    std::this_thread::sleep_for(kEndPause);
  if (ending.empty()) return;
  log(LogLevel::kWarn, "nccl: {} communicators have not ended in time and are aborted",
      ending.size());
  abort_communicators();
}

// ---- Reports ----

std::string NcclTransport::route(int32_t peer) const {
  return fmt::format("nccl {} rank {} on cuda:{}", version_text(communicator_->api().version), peer,
                     communicator_->device());
}

void NcclTransport::count(const Transfer& t) {
  std::lock_guard lock(counters_mutex_);
  TransferCounters& c = counters_[{t.op->key.comm, t.peer}];
  const bool payload = t.message_class == MessageClass::kPayload;
  if (t.is_send) {
    (payload ? c.payload_bytes_sent : c.header_bytes_sent) += t.bytes;
    ++c.messages_sent;
  } else {
    (payload ? c.payload_bytes_received : c.header_bytes_received) += t.bytes;
    ++c.messages_received;
  }
}

void NcclTransport::count_header(int32_t peer, bool sent) {
  std::lock_guard lock(counters_mutex_);
  TransferCounters& c = counters_[{0, peer}];
  (sent ? c.service_bytes_sent : c.service_bytes_received) += sizeof(GroupHeader);
}

TransferCounters NcclTransport::counters(uint64_t comm, int32_t peer) const {
  std::lock_guard lock(counters_mutex_);
  const auto it = counters_.find({comm, peer});
  return it == counters_.end() ? TransferCounters{} : it->second;
}

}  // namespace sotto::nccl
