#include "transports/nccl/nccl_transport.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/base/log.h"
#include "core/iface/device.h"

namespace sotto::nccl {
namespace {

constexpr int64_t kWatchNs = 20'000'000;  // between looks at NCCL's asynchronous error
// NCCL does not say who is gone, the control mesh does; so long it has time for it.
constexpr int64_t kNameTheRankNs = 1'000'000'000;
constexpr auto kDrainLimit = std::chrono::seconds(10);
constexpr auto kDrainPause = std::chrono::microseconds(100);

}  // namespace

Result<std::unique_ptr<NcclTransport>> NcclTransport::make(
    std::unique_ptr<Communicator> communicator, std::shared_ptr<NcclPoller> poller,
    const ControlPlane& control, TransferSink& sink, int64_t timeout_us) {
  std::unique_ptr<NcclTransport> made(new NcclTransport(std::move(communicator), std::move(poller),
                                                        control.rank(), control.size(), sink,
                                                        timeout_us));
  const OnDevice on(made->communicator_->device());
  SOTTO_TRY(on.status());
  int lowest = 0, highest = 0;
  SOTTO_TRY(cuda_status(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
                        "cudaDeviceGetStreamPriorityRange"));
  SOTTO_TRY(
      cuda_status(cudaStreamCreateWithPriority(&made->stream_, cudaStreamNonBlocking, highest),
                  "cudaStreamCreateWithPriority"));
  return made;
}

NcclTransport::NcclTransport(std::unique_ptr<Communicator> communicator,
                             std::shared_ptr<NcclPoller> poller, int32_t rank, int32_t size,
                             TransferSink& sink, int64_t timeout_us)
    : communicator_(std::move(communicator)),
      poller_(std::move(poller)),
      rank_(rank),
      size_(size),
      sink_(sink),
      timeout_us_(timeout_us),
      pinned_(communicator_->device()),
      events_(communicator_->device()) {
  poller_->add(this);
}

NcclTransport::~NcclTransport() {
  poller_->remove(this);
  if (!groups_.empty()) stop();
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

const TransportCaps& NcclTransport::caps() const {
  static const TransportCaps caps{.name = "nccl",
                                  .matching = Matching::kByOrder,
                                  .stream_ordered = true,
                                  .host_memory_only = false};
  return caps;
}

void NcclTransport::refuse(Transfer& transfer) {
  sink_.on_transfer(transfer,
                    error(Code::kInternal, "nccl: messages come in groups, not one by one"));
}

// ---- Issuing ----

Status NcclTransport::issue(std::span<Transfer* const> transfers, Device* device, uint32_t lane) {
  if (failed_ || !communicator_->open())
    return error(Code::kTransport, "nccl: the communicator has failed or is closed");
  if (transfers.empty()) return ok_status();
  if (remote_error_ns_ != 0) return rank_is_gone();
  const OnDevice on(communicator_->device());
  SOTTO_TRY(on.status());
  Group group;
  SOTTO_TRY(choose_stream(device, lane, &group));
  Status status = prepare(transfers, &group);
  if (status.ok()) status = launch(group);
  if (!status.ok()) {
    // What NCCL has queued may still use the memory: the group ends with the communicator.
    groups_.push_back(std::move(group));
    if (status.code() == Code::kPeerLost) {
      remote_error_ns_ = Clock::monotonic().now_ns();
      return rank_is_gone();
    }
    failed_ = true;
    return status;
  }
  for (const PeerNote& note : group.notes) count_note(note.peer, true);
  if (!group.reports) {
    for (const Transfer* t : transfers) count(*t);
    group.transfers.clear();  // the engine may use them again before this group is seen to be done
  }
  last_stream_ = group.stream;
  last_event_ = group.event;
  groups_.push_back(std::move(group));
  return ok_status();
}

// NCCL does not say who is gone. The control mesh will; if it does not, watch() fails the comm.
Status NcclTransport::rank_is_gone() {
  return Status(Code::kInProgress, "nccl: a rank is gone, and is about to be named");
}

Status NcclTransport::choose_stream(Device* device, uint32_t lane, Group* group) const {
  const DeviceCaps& caps = device->caps();
  if (caps.synchronous) {
    group->stream = stream_;
    group->reports = true;
    return ok_status();
  }
  group->stream = static_cast<cudaStream_t>(device->lane_stream(lane));
  if (caps.id.type == DeviceType::kCuda && caps.id.index == communicator_->device() &&
      group->stream != nullptr)
    return ok_status();
  return invalid_argument(
      "nccl: the operation is on {}, but the communicator was made on cuda:{}, the device that was "
      "current",
      device_name(caps.id), communicator_->device());
}

Status NcclTransport::prepare(std::span<Transfer* const> transfers, Group* group) {
  group->transfers.assign(transfers.begin(), transfers.end());
  for (Transfer* t : transfers) {
    if (group->keys.empty() || !(group->keys.back() == t->op->key))
      group->keys.push_back(t->op->key);
    if (t->peer < 0 || t->peer >= size_ || t->peer == rank_) {
      return error(Code::kInternal, "nccl: message of rank {} to or from rank {} of {}", rank_,
                   t->peer, size_);
    }
    SOTTO_ASSIGN(void* const memory, reachable(*t, group));
    if (t->is_send && memory != t->data) std::memcpy(memory, t->data, t->bytes);
    const auto same = [&](const PeerNote& n) { return n.peer == t->peer; };
    if (std::none_of(group->notes.begin(), group->notes.end(), same)) {
      SOTTO_ASSIGN(std::byte* const both, pinned_.take(2 * sizeof(Note)));
      group->notes.push_back(
          {t->peer, make_note(transfers, t->peer), both, both + sizeof(Note), {}, false});
      std::memcpy(both, &group->notes.back().mine, sizeof(Note));
      std::memset(both + sizeof(Note), 0, sizeof(Note));
    }
  }
  SOTTO_ASSIGN(group->event, events_.take());
  return ok_status();
}

// Where NCCL can read or write for the transfer.
Result<void*> NcclTransport::reachable(Transfer& t, Group* group) {
  if (t.bytes == 0) return t.data;
  cudaPointerAttributes at{};
  SOTTO_TRY(cuda_status(cudaPointerGetAttributes(&at, t.data), "cudaPointerGetAttributes"));
  switch (at.type) {
    case cudaMemoryTypeHost:
    case cudaMemoryTypeManaged: return t.data;
    case cudaMemoryTypeDevice:
      if (at.device == communicator_->device()) return t.data;
      return invalid_argument(
          "nccl: memory is on cuda:{}, but the communicator was made on cuda:{}, the device that "
          "was current",
          at.device, communicator_->device());
    case cudaMemoryTypeUnregistered: break;
  }
  SOTTO_ASSIGN(std::byte* const memory, pinned_.take(t.bytes));
  group->staged.push_back({&t, memory});
  return static_cast<void*>(memory);
}

void* NcclTransport::memory_of(const Group& group, const Transfer& t) const {
  for (const Staged& s : group.staged) {
    if (s.transfer == &t) return s.at;
  }
  return t.data;
}

Status NcclTransport::launch(Group& group) {
  const Api& api = communicator_->api();
  if (last_event_ != nullptr && last_stream_ != group.stream)
    SOTTO_TRY(
        cuda_status(cudaStreamWaitEvent(group.stream, last_event_, 0), "cudaStreamWaitEvent"));
  SOTTO_TRY(api.status(api.GroupStart(), "ncclGroupStart", nullptr));
  const Status queued = queue(group);
  const ncclResult_t ended = api.GroupEnd();  // also after an error: groups are balanced
  SOTTO_TRY(queued);
  SOTTO_TRY(communicator_->settle(ended, "ncclGroupEnd", timeout_us_));
  SOTTO_TRY(cuda_status(cudaEventRecord(group.event, group.stream), "cudaEventRecord"));
  group.recorded = true;
  return ok_status();
}

// Of two ranks' calls that belong together the i-th send meets the i-th receive, so both have their
// notes first, then the messages in the order of the plan.
Status NcclTransport::queue(const Group& group) {
  const Api& api = communicator_->api();
  const ncclComm_t comm = communicator_->handle();
  const auto called = [&](ncclResult_t result, const char* call) {
    return result == ncclInProgress ? ok_status() : api.status(result, call, comm);
  };
  for (const PeerNote& n : group.notes) {
    SOTTO_TRY(
        called(api.Send(n.out, sizeof(Note), ncclUint8, n.peer, comm, group.stream), "ncclSend"));
    SOTTO_TRY(
        called(api.Recv(n.in, sizeof(Note), ncclUint8, n.peer, comm, group.stream), "ncclRecv"));
  }
  for (const Transfer* t : group.transfers) {
    if (t->bytes == 0) continue;
    void* const at = memory_of(group, *t);
    SOTTO_TRY(
        t->is_send
            ? called(api.Send(at, t->bytes, ncclUint8, t->peer, comm, group.stream), "ncclSend")
            : called(api.Recv(at, t->bytes, ncclUint8, t->peer, comm, group.stream), "ncclRecv"));
  }
  return ok_status();
}

// ---- Progress ----

bool NcclTransport::run() {
  if (failed_ || !communicator_->open()) return false;
  bool any = false;
  while (!groups_.empty() && groups_.front().recorded) {
    const cudaError_t state = cudaEventQuery(groups_.front().event);
    if (state == cudaErrorNotReady) {
      (void)cudaGetLastError();
      break;
    }
    if (state != cudaSuccess) {
      fail(-1, cuda_status(state, "cudaEventQuery behind a group of nccl"));
      return true;
    }
    if (const PeerNote* differs = look_at_notes(groups_.front()); differs != nullptr) {
      fail(differs->peer, differs->meant);
      return true;
    }
    // A group that NCCL has given up ends like one that is done: watch() says why.
    const auto& notes = groups_.front().notes;
    const auto seen = [](const PeerNote& note) { return note.seen; };
    if (!std::all_of(notes.begin(), notes.end(), seen) && !communicator_->check().ok()) break;
    Group done = std::move(groups_.front());
    groups_.pop_front();
    complete(done);
    any = true;
  }
  const int64_t now = Clock::monotonic().now_ns();
  if (now < next_watch_ns_) return any;
  next_watch_ns_ = now + kWatchNs;
  watch();
  return any || failed_;
}

// Null: nothing of what has arrived is meant for something else.
const NcclTransport::PeerNote* NcclTransport::look_at_notes(Group& group) {
  for (PeerNote& note : group.notes) {
    Note theirs;
    if (!note.seen && has_arrived(note.in, &theirs)) {
      note.seen = true;
      note.meant = compare(note.mine, rank_, theirs, note.peer);
    }
    if (!note.meant.ok()) return &note;
  }
  return nullptr;
}

// The device has executed the group.
void NcclTransport::complete(Group& group) {
  if (last_event_ == group.event) last_event_ = nullptr;
  for (const Staged& s : group.staged) {
    if (!s.transfer->is_send) std::memcpy(s.transfer->data, s.at, s.transfer->bytes);
  }
  bool all_seen = true;
  for (const PeerNote& note : group.notes) {
    count_note(note.peer, false);
    all_seen = all_seen && note.seen;
  }
  release(group);
  if (!all_seen) {
    fail(-1, error(Code::kProtocol, "nccl: what a rank has sent does not begin with its note"));
    return;
  }
  for (Transfer* t : group.transfers) {
    count(*t);
    sink_.on_transfer(*t, ok_status());
  }
}

Status NcclTransport::verify(const OpPosting& op) {
  for (Group& group : groups_) {
    if (std::find(group.keys.begin(), group.keys.end(), op.key) == group.keys.end()) continue;
    if (const PeerNote* differs = look_at_notes(group); differs != nullptr) return differs->meant;
  }
  return ok_status();
}

void NcclTransport::release(Group& group) {
  for (const Staged& s : group.staged) pinned_.give_back(s.at);
  for (const PeerNote& note : group.notes) pinned_.give_back(note.out);
  if (group.event != nullptr) events_.give_back(group.event);
}

// Differences that make operations hang, and errors of NCCL.
void NcclTransport::watch() {
  for (Group& group : groups_) {
    if (const PeerNote* differs = look_at_notes(group); differs != nullptr) {
      fail(differs->peer, differs->meant);
      return;
    }
  }
  const Status state = communicator_->check();
  if (state.ok()) return;
  const int64_t now = Clock::monotonic().now_ns();
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
  failed_ = true;
  communicator_->abort();
  const auto limit = std::chrono::steady_clock::now() + kDrainLimit;
  const auto working = [](const Group& group) {
    const cudaError_t state =
        group.recorded ? cudaEventQuery(group.event) : cudaStreamQuery(group.stream);
    return state == cudaErrorNotReady;
  };
  while (std::any_of(groups_.begin(), groups_.end(), working)) {
    (void)cudaGetLastError();
    if (std::chrono::steady_clock::now() > limit) {
      log(LogLevel::kError, "nccl: the device still works for an aborted communicator after {} s",
          kDrainLimit.count());
      break;
    }
    std::this_thread::sleep_for(kDrainPause);
  }
  for (Group& group : groups_) release(group);
  groups_.clear();
  last_event_ = nullptr;
}

// An aborted communicator is of no more use, so everything in flight ends, not this operation's
// alone.
void NcclTransport::cancel(const OpPosting&) {
  if (communicator_->open() || !groups_.empty()) stop();
}

void NcclTransport::close(Deadline deadline) {
  const Clock& clock = Clock::monotonic();
  while (!groups_.empty() && !failed_ && !deadline.passed(clock)) {
    if (!run()) std::this_thread::sleep_for(kDrainPause);
  }
  if (!groups_.empty() || failed_) {
    stop();
    return;
  }
  communicator_->close(deadline, clock);
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

void NcclTransport::count_note(int32_t peer, bool sent) {
  std::lock_guard lock(counters_mutex_);
  TransferCounters& c = counters_[{0, peer}];
  (sent ? c.service_bytes_sent : c.service_bytes_received) += sizeof(Note);
}

TransferCounters NcclTransport::counters(uint64_t comm, int32_t peer) const {
  std::lock_guard lock(counters_mutex_);
  const auto it = counters_.find({comm, peer});
  return it == counters_.end() ? TransferCounters{} : it->second;
}

}  // namespace sotto::nccl
