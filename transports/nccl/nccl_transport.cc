#include "transports/nccl/nccl_transport.h"

#include <chrono>
#include <thread>
#include <utility>

#include "core/base/log.h"
#include "core/iface/device.h"
#include "cuda/calls/cuda_calls.h"
#include "transports/nccl/ask_until.h"
#include "transports/nccl/caps.h"
#include "transports/nccl/connect_peers.h"

namespace sotto::nccl {
namespace {

constexpr int64_t kWatchNs = 20'000'000;  // between looks at NCCL's asynchronous error
// Time for the control plane to name a lost rank, which NCCL does not.
constexpr int64_t kNameTheRankNs = 1'000'000'000;
// For NCCL to queue a group.
constexpr int64_t kSpinUs = 200;
constexpr auto kPause = std::chrono::microseconds(100);
// For an abort, and for what it ends on the device.
constexpr int64_t kStopLimitUs = 10'000'000;

}  // namespace

Result<std::unique_ptr<NcclTransport>> NcclTransport::make(
    std::unique_ptr<Communicator> communicator, std::shared_ptr<NcclPoller> poller,
    const ControlPlane& control, TransferSink& sink, Driver& driver, Deadline deadline,
    const NcclOptions& options) {
  std::unique_ptr<NcclTransport> made(new NcclTransport(std::move(communicator), std::move(poller),
                                                        control, sink, driver.clock(), options));
  const Communicator& all = made->communicators_.all();
  const OnDevice on(all.device());
  SOTTO_TRY(on.status());
  int lowest = 0, highest = 0;
  SOTTO_TRY(cuda_status(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
                        "cudaDeviceGetStreamPriorityRange"));
  SOTTO_TRY(
      cuda_status(cudaStreamCreateWithPriority(&made->stream_, cudaStreamNonBlocking, highest),
                  "cudaStreamCreateWithPriority"));
  SOTTO_TRY(made->groups_.reserve());
  const Status connected =
      connect_peers(made->groups_, all, made->stream_, control, driver, deadline);
  if (!connected.ok()) {
    made->stop();
    ask_until([&] { return made->settle() || made->settled(); }, driver, made->limit_);
    return connected;
  }
  made->poller_->add(made.get());
  return made;
}

NcclTransport::NcclTransport(std::unique_ptr<Communicator> communicator,
                             std::shared_ptr<NcclPoller> poller, const ControlPlane& control,
                             TransferSink& sink, const Clock& clock, const NcclOptions& options)
    : communicators_(std::move(communicator)),
      poller_(std::move(poller)),
      control_(control),
      sink_(sink),
      clock_(clock),
      caps_(caps_of(options.native)),
      groups_(communicators_) {}

NcclTransport::~NcclTransport() {
  poller_->remove(this);
  if (life_ == Life::kWorking && !groups_.empty()) stop();
  while (!settled()) {
    if (!settle()) std::this_thread::sleep_for(kPause);
  }
  if (stream_ == nullptr) return;
  const OnDevice on(communicators_.all().device());
  (void)cudaStreamDestroy(stream_);
}

Status NcclTransport::closed_error() {
  return error(Code::kTransport, "nccl: the communicator has failed or is closed");
}

// The root comm fails if this rank cannot join, since the other ranks wait for it.
Status NcclTransport::join(uint64_t comm, int32_t rank, const std::vector<std::string>& invitations,
                           Driver& driver, Deadline deadline) {
  if (closed()) return closed_error();
  const Status joined = communicators_.join(comm, rank, invitations, control_, driver, deadline);
  if (!joined.ok() && !control_.failure())
    fail(-1, joined.with_prefix(fmt::format("rank {}", communicators_.all().rank())));
  return joined;
}

// ---- Issuing ----

// Called again with the same transfers as long as it is in progress.
Status NcclTransport::issue(std::span<Transfer* const> transfers, Device* device, uint32_t lane) {
  if (closed()) return closed_error();
  if (transfers.empty()) return ok_status();
  if (remote_error_ns_ != 0) return rank_is_gone();
  const OnDevice on(communicators_.all().device());
  SOTTO_TRY(on.status());
  Status status;
  MessageGroup* group = groups_.unqueued();
  const bool spin = group == nullptr;
  if (group == nullptr) {
    SOTTO_ASSIGN(const cudaStream_t stream, stream_of(*device, lane));
    const DeviceCaps& caps = device->caps();
    group =
        &groups_.begin(stream, caps.synchronous, caps.captures ? transfers.front()->op : nullptr);
    status = groups_.prepare(*group, transfers);
  }
  if (status.ok()) status = launch(*group, spin);
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
  if (group->captured() != nullptr) {
    captured_.add(groups_.take_last());
    return ok_status();
  }
  group->headers().count(counters_, true);
  if (!group->reports()) {
    group->count_transfers(counters_);
    group->forget_transfers();  // the engine may use them again before the group has executed
  }
  return ok_status();
}

// NCCL queues a group from a thread of its own, which takes less than coming back to it does.
// `spin`: waits for that a moment.
Status NcclTransport::launch(MessageGroup& group, bool spin) {
  const Deadline deadline = Deadline::in_us(clock_, spin ? kSpinUs : 0);
  for (;;) {
    const Status status = groups_.launch(group);
    if (status.code() != Code::kInProgress || deadline.passed(clock_)) return status;
    std::this_thread::yield();
  }
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
  if (caps.id.type == DeviceType::kCuda && caps.id.index == communicators_.all().device() &&
      stream != nullptr)
    return stream;
  return error(Code::kInternal, "nccl: a group on {}, by a communicator of cuda:{}",
               device_name(caps.id), communicators_.all().device());
}

// ---- Progress ----

bool NcclTransport::run() {
  if (!settled()) return settle();
  if (closed()) return false;
  const OnDevice on(communicators_.all().device());
  if (!on.status().ok()) {
    fail(-1, on.status());
    return true;
  }
  bool any = false;
  while (MessageGroup* const oldest = groups_.oldest_queued()) {
    const cudaError_t state = cudaEventQuery(oldest->event());
    if (state == cudaErrorNotReady) {
      (void)cudaGetLastError();
      break;
    }
    if (state != cudaSuccess) {
      fail(-1, cuda_status(state, "cudaEventQuery behind a group of nccl"));
      return true;
    }
    if (const PeerHeader* differs = oldest->headers().check(); differs != nullptr) {
      fail(differs->peer, differs->meant);
      return true;
    }
    complete(*oldest);
    groups_.pop_oldest();
    any = true;
  }
  const int64_t now = clock_.now_ns();
  if (now < next_watch_ns_) return any;
  next_watch_ns_ = now + kWatchNs;
  watch();
  return any || failed_;
}

// The device has executed the group, and so all of it has arrived: NCCL holds up its stream until
// then or its abort.
void NcclTransport::complete(MessageGroup& group) {
  group.deliver();
  group.headers().count(counters_, false);
  const bool all_seen = group.headers().all_seen();
  groups_.release(group);
  if (!all_seen) {
    fail(-1, missing_group_header());
    return;
  }
  for (Transfer* t : group.transfers()) {
    counters_.count(*t);
    sink_.on_transfer(*t, ok_status());
  }
}

// Differences that make operations hang, and errors of NCCL.
void NcclTransport::watch() {
  const PeerHeader* differs = groups_.check();
  if (differs == nullptr) differs = captured_.check();
  if (differs != nullptr) {
    fail(differs->peer, differs->meant);
    return;
  }
  communicators_.reap();
  const Status state = communicators_.check();
  if (state.ok()) return;
  const int64_t now = clock_.now_ns();
  if (state.code() == Code::kPeerLost) {
    if (remote_error_ns_ == 0) remote_error_ns_ = now;
    if (now - remote_error_ns_ < kNameTheRankNs) return;
  }
  fail(-1, state.with_prefix(fmt::format("rank {}", communicators_.all().rank())));
}

// ---- Ends ----

void NcclTransport::fail(int32_t peer, const Status& status) {
  if (std::exchange(failed_, true)) return;
  sink_.on_failure(peer, status);
}

// Begins to end what is in flight.
void NcclTransport::stop() {
  failed_ = true;
  if (life_ == Life::kStopping || life_ == Life::kEnded) return;
  life_ = Life::kStopping;
  limit_ = Deadline::in_us(clock_, kStopLimitUs);
  communicators_.abort();
}

// True: what was begun is over now, or has taken too long.
bool NcclTransport::settle() {
  if (settled()) return false;
  const bool ended = communicators_.ended(clock_) && !groups_.working();
  if (!ended && !limit_.passed(clock_)) return false;
  if (!ended) {
    log(LogLevel::kError, "nccl: the device still works for an aborted communicator after {} s",
        kStopLimitUs / 1'000'000);
    groups_.leave_memory_behind();
  }
  groups_.forget();
  life_ = Life::kEnded;
  return true;
}

// An aborted communicator is of no more use, so everything in flight ends, not this operation's
// alone.
void NcclTransport::cancel(const OpDescriptor&) { stop(); }

void NcclTransport::close(Deadline deadline) {
  while (!groups_.empty() && !failed_ && !deadline.passed(clock_)) {
    if (!run()) std::this_thread::sleep_for(kPause);
  }
  if (!groups_.empty() || failed_) return stop();
  if (life_ != Life::kWorking) return;
  life_ = Life::kClosing;
  communicators_.end(deadline);
  if (!deadline.never()) limit_ = Deadline::in_us(clock_, deadline.left_us(clock_) + kStopLimitUs);
}

// ---- Queries ----

// After a failure headers may be missing: the device need not have executed all of the operation.
Status NcclTransport::verify(const OpDescriptor& op) {
  SOTTO_TRY(captured_.verify(op, !failed_));
  return groups_.verify(op.key);
}

std::string NcclTransport::route(int32_t peer) const {
  return fmt::format("nccl {} rank {} on cuda:{}", version_text(communicators_.all().api().version),
                     peer, communicators_.all().device());
}

}  // namespace sotto::nccl
