#include "transports/nccl/nccl_transport.h"

#include <chrono>
#include <thread>
#include <utility>

#include "core/iface/device.h"
#include "cuda/calls/cuda_calls.h"
#include "transports/nccl/caps.h"

namespace sotto::nccl {
namespace {

constexpr int64_t kWatchNs = 20'000'000;  // between looks at NCCL's asynchronous error
// Time for the control plane to name a lost rank, which NCCL does not.
constexpr int64_t kNameTheRankNs = 1'000'000'000;
constexpr auto kClosePause = std::chrono::microseconds(100);

}  // namespace

Result<std::unique_ptr<NcclTransport>> NcclTransport::make(
    std::unique_ptr<Communicator> communicator, std::shared_ptr<NcclPoller> poller,
    const ControlPlane& control, TransferSink& sink, const Clock& clock,
    const NcclOptions& options) {
  std::unique_ptr<NcclTransport> made(
      new NcclTransport(std::move(communicator), std::move(poller), control, sink, clock, options));
  const OnDevice on(made->communicators_.all().device());
  SOTTO_TRY(on.status());
  int lowest = 0, highest = 0;
  SOTTO_TRY(cuda_status(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
                        "cudaDeviceGetStreamPriorityRange"));
  SOTTO_TRY(
      cuda_status(cudaStreamCreateWithPriority(&made->stream_, cudaStreamNonBlocking, highest),
                  "cudaStreamCreateWithPriority"));
  SOTTO_TRY(made->groups_.reserve());
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
      groups_(communicators_) {
  poller_->add(this);
}

NcclTransport::~NcclTransport() {
  poller_->remove(this);
  if (!groups_.empty()) stop();
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
  if (group == nullptr) {
    SOTTO_ASSIGN(const cudaStream_t stream, stream_of(*device, lane));
    const DeviceCaps& caps = device->caps();
    group =
        &groups_.begin(stream, caps.synchronous, caps.captures ? transfers.front()->op : nullptr);
    status = group->prepare(transfers);
  }
  if (status.ok()) status = groups_.launch(*group);
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
  return invalid_argument(
      "nccl: the operation is on {}, but the communicator was made on cuda:{}, the device that was "
      "current",
      device_name(caps.id), communicators_.all().device());
}

// ---- Progress ----

bool NcclTransport::run() {
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

// Ends what is in flight; nothing is touched any more on return.
void NcclTransport::stop() {
  const OnDevice on(communicators_.all().device());
  failed_ = true;
  communicators_.abort();
  groups_.stop(clock_);
}

// An aborted communicator is of no more use, so everything in flight ends, not this operation's
// alone.
void NcclTransport::cancel(const OpPosting&) {
  if (communicators_.all().open() || !groups_.empty()) stop();
}

void NcclTransport::close(Deadline deadline) {
  while (!groups_.empty() && !failed_ && !deadline.passed(clock_)) {
    if (!run()) std::this_thread::sleep_for(kClosePause);
  }
  if (!groups_.empty() || failed_) {
    stop();
  } else {
    communicators_.end(clock_, deadline);
  }
}

// ---- Queries ----

// After a failure headers may be missing: the device need not have executed all of the operation.
Status NcclTransport::verify(const OpPosting& op) {
  SOTTO_TRY(captured_.verify(op, !failed_));
  return groups_.verify(op.key);
}

std::string NcclTransport::route(int32_t peer) const {
  return fmt::format("nccl {} rank {} on cuda:{}", version_text(communicators_.all().api().version),
                     peer, communicators_.all().device());
}

}  // namespace sotto::nccl
