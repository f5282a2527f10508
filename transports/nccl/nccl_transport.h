// Messages over NCCL. A round of a plan is one group of sends and receives on a stream, and
// complete when an event behind it is. Messages match by order; group headers (group_header.h) show
// whether both ranks mean the same ones. A native collective is one call for all messages that it
// stands for.
//
// What it is made of: the communicators, the groups in flight and those in CUDA graphs, and the
// counters. A group (message_group.h) has its headers, its memory (staging.h) and its calls of
// NCCL.
//
// Threads: the driving thread, unless the base class says otherwise.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/iface/rendezvous.h"
#include "core/iface/transport.h"
#include "transports/nccl/captured_groups.h"
#include "transports/nccl/communicators.h"
#include "transports/nccl/counters.h"
#include "transports/nccl/in_flight_groups.h"
#include "transports/nccl/poller.h"

namespace sotto::nccl {

class NcclTransport final : public QueueTransport, private NcclPollSource {
 public:
  // Collective over the control plane: connects the ranks with each other, within the deadline.
  static Result<std::unique_ptr<NcclTransport>> make(std::unique_ptr<Communicator> communicator,
                                                     std::shared_ptr<NcclPoller> poller,
                                                     const ControlPlane& control,
                                                     TransferSink& sink, Driver& driver,
                                                     Deadline deadline, const NcclOptions& options);
  ~NcclTransport() override;

  const TransportCaps& caps() const override { return caps_; }
  Result<std::string> invite(bool first) override { return communicators_.invite(first); }
  Status join(uint64_t comm, int32_t rank, const std::vector<std::string>& invitations,
              Driver& driver, Deadline deadline) override;
  void leave(uint64_t comm) override {
    communicators_.leave(comm);
    counters_.drop(comm);
  }
  uint64_t header_bytes(uint64_t) const override { return 0; }
  Status post_op(const OpDescriptor&) override { return ok_status(); }
  void restart(const OpDescriptor& op) override { captured_.restart(op, counters_); }
  void release_captured(const OpDescriptor& op) override { groups_.reuse(captured_.forget(op)); }
  bool idle() const override { return groups_.empty(); }
  std::optional<DeviceId> device() const override {
    return DeviceId{DeviceType::kCuda, communicators_.all().device()};
  }
  Status verify(const OpDescriptor& op) override;
  void complete(const OpDescriptor& op) override {
    captured_.complete(op, counters_);
    groups_.complete(op.key);
  }
  void cancel(const OpDescriptor& op) override;
  Status issue(std::span<Transfer* const> group, Device* device, uint32_t lane) override;
  bool settled() const override { return life_ == Life::kWorking || life_ == Life::kEnded; }
  std::string route(int32_t peer) const override;
  TransferCounters counters(uint64_t comm, int32_t peer) const override {
    return counters_.read(comm, peer);
  }
  void close(Deadline deadline) override;

 private:
  NcclTransport(std::unique_ptr<Communicator> communicator, std::shared_ptr<NcclPoller> poller,
                const ControlPlane& control, TransferSink& sink, const Clock& clock,
                const NcclOptions& options);
  bool run() override;
  bool busy() const override { return !groups_.empty() || captured_.executing() || !settled(); }

  bool closed() const { return failed_ || !communicators_.all().open(); }
  static Status closed_error();
  static Status rank_is_gone();
  Result<cudaStream_t> stream_of(Device& device, uint32_t lane) const;
  Status launch(MessageGroup& group, bool spin);
  void complete(MessageGroup& group);
  void watch();
  void fail(int32_t peer, const Status& status);
  void stop();
  bool settle();

  Communicators communicators_;
  const std::shared_ptr<NcclPoller> poller_;
  const ControlPlane& control_;
  TransferSink& sink_;
  const Clock& clock_;
  const TransportCaps caps_;
  cudaStream_t stream_ = nullptr;  // for operations on the host
  InFlightGroups groups_;
  CapturedGroups captured_;
  Counters counters_;
  // Closing: in order, stopping: by an abort.
  enum class Life : uint8_t { kWorking, kClosing, kStopping, kEnded };
  Life life_ = Life::kWorking;
  Deadline limit_;  // of what is closing or stopping
  bool failed_ = false;
  int64_t next_watch_ns_ = 0;
  int64_t remote_error_ns_ = 0;  // time of NCCL's first error about a lost rank; 0: none
};

}  // namespace sotto::nccl
