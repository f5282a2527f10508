// Messages over NCCL. A round of a plan is one group of sends and receives on a stream, and
// complete when an event behind it is. Messages match by order; group headers (group_header.h) show
// whether both ranks mean the same ones. A native collective is one call for all messages that it
// stands for.
//
// Device memory of the communicator's device and pinned host memory go as they are; other host
// memory through pinned blocks of the transport.
//
// Threads: the driving thread, unless the base class says otherwise.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/base/clock.h"
#include "core/iface/rendezvous.h"
#include "core/iface/transport.h"
#include "transports/nccl/communicator.h"
#include "transports/nccl/group_header.h"
#include "transports/nccl/poller.h"
#include "transports/nccl/pools.h"

namespace sotto::nccl {

class NcclTransport final : public QueueTransport, private NcclPollSource {
 public:
  static Result<std::unique_ptr<NcclTransport>> make(std::unique_ptr<Communicator> communicator,
                                                     std::shared_ptr<NcclPoller> poller,
                                                     const ControlPlane& control,
                                                     TransferSink& sink, const Clock& clock,
                                                     const NcclOptions& options);
  ~NcclTransport() override;

  const TransportCaps& caps() const override { return caps_; }
  Result<std::string> invite(bool first) override;
  Status join(uint64_t comm, int32_t rank, const std::vector<std::string>& invitations,
              Driver& driver, Deadline deadline) override;
  void leave(uint64_t comm) override;
  uint64_t header_bytes(uint64_t) const override { return 0; }
  Status post_op(const OpPosting&) override { return ok_status(); }
  void restart(const OpPosting& op) override;
  void release_captured(const OpPosting& op) override;
  bool idle() const override { return groups_.empty(); }
  Status verify(const OpPosting& op) override;
  void retire(const OpPosting& op) override;
  void cancel(const OpPosting& op) override;
  Status issue(std::span<Transfer* const> group, Device* device, uint32_t lane) override;
  std::string route(int32_t peer) const override;
  TransferCounters counters(uint64_t comm, int32_t peer) const override;
  void close(Deadline deadline) override;

 private:
  // Pinned memory in place of user memory.
  struct Staged {
    void* memory;
    std::byte* at;
    uint64_t bytes;
    bool received;
  };
  // A message or a native collective, with the memory that NCCL accesses.
  struct Action {
    const Transfer* transfer;
    void* in = nullptr;  // of a message, which is `in` alone
    void* out = nullptr;
  };
  struct PeerHeader {
    int32_t peer;
    GroupHeader mine;
    std::byte* out;
    std::byte* in;
    Status meant;  // once seen: OK, or the difference from the peer's
    bool seen = false;
  };
  // How far a group is queued. NCCL queues in the background: the first use of a connection takes
  // until the peer has issued its part.
  enum class QueueStage : uint8_t { kNew, kMessages, kNatives, kQueued };
  // Messages that were issued together and are not complete.
  struct MessageGroup {
    cudaStream_t stream = nullptr;
    bool reports = false;              // by on_transfer; else the engine has its own events
    std::vector<OpKey> keys;           // of the operations
    std::vector<Transfer*> transfers;  // while `reports` or being issued
    std::vector<Action> messages, natives;
    const Communicator* natives_on = nullptr;
    std::vector<Staged> staged;
    std::vector<PeerHeader> headers;
    std::byte* header_memory = nullptr;  // pinned, for all of them
    cudaEvent_t event = nullptr;         // behind the group, once it is queued
    QueueStage stage = QueueStage::kNew;
    const OpPosting* recorded = nullptr;  // what is in a graph: its operation, known by this place
    bool executing = false;               // a launch of that is awaited
  };

  NcclTransport(std::unique_ptr<Communicator> communicator, std::shared_ptr<NcclPoller> poller,
                const ControlPlane& control, TransferSink& sink, const Clock& clock,
                const NcclOptions& options);
  bool run() override;
  bool busy() const override;

  static Status closed();
  static Status rank_is_gone();
  Result<cudaStream_t> stream_of(Device& device, uint32_t lane) const;
  MessageGroup& new_group(cudaStream_t stream);
  Status prepare(std::span<Transfer* const> transfers, MessageGroup* group);
  Result<Action> message(const Transfer& transfer, MessageGroup* group);
  Result<Action> native(const Transfer& transfer, MessageGroup* group);
  uint64_t headers_bytes() const {
    return 2 * sizeof(GroupHeader) * static_cast<uint64_t>(size_ - 1);
  }
  static void write_header(const PeerHeader& header);
  Status add_header(int32_t peer, std::span<Transfer* const> transfers, MessageGroup* group);
  Result<void*> reachable(void* memory, uint64_t bytes, bool received, MessageGroup* group);
  Status launch(MessageGroup& group);
  Status together(const MessageGroup& group, const Communicator& on,
                  Status (NcclTransport::*queue)(const MessageGroup&) const) const;
  Status queue_messages(const MessageGroup& group) const;
  Status queue_natives(const MessageGroup& group) const;
  const Communicator& communicator_of(uint64_t comm) const;
  Status check_communicators() const;
  const PeerHeader* check_headers(MessageGroup& group);
  template <class Visit>
  void visit_recorded(const OpPosting& op, Visit&& visit);
  void complete(MessageGroup& group);
  void release(MessageGroup& group);
  void watch();
  void fail(int32_t peer, const Status& status);
  void stop();
  void abort_communicators();
  void count(const Transfer& transfer);
  void count_header(int32_t peer, bool sent);

  const std::unique_ptr<Communicator> communicator_;  // of all ranks
  // Joined communicators, by epoch of the comm, and those whose end has begun.
  std::map<uint64_t, std::unique_ptr<Communicator>> joined_;
  std::vector<std::unique_ptr<Communicator>> ending_;
  const std::shared_ptr<NcclPoller> poller_;
  const ControlPlane& control_;
  const int32_t rank_;
  const int32_t size_;
  TransferSink& sink_;
  const Clock& clock_;
  const TransportCaps caps_;
  cudaStream_t stream_ = nullptr;       // for operations on the host
  cudaStream_t last_stream_ = nullptr;  // of the group issued last
  cudaEvent_t last_event_ = nullptr;    // behind it, if it is not complete
  PinnedPool pinned_;
  EventPool events_;
  std::list<MessageGroup> groups_;    // all but the last are queued
  std::list<MessageGroup> spare_;     // for reuse, with the memory of their vectors
  std::list<MessageGroup> recorded_;  // until they are forgotten: graphs have their memory
  std::vector<std::pair<OpKey, Status>> differing_;  // operations of groups that were stopped
  bool failed_ = false;
  int64_t next_watch_ns_ = 0;
  int64_t remote_error_ns_ = 0;  // time of NCCL's first error about a lost rank; 0: none

  mutable std::mutex counters_mutex_;
  std::map<std::pair<uint64_t, int32_t>, TransferCounters> counters_;  // comm epoch, peer
};

}  // namespace sotto::nccl
