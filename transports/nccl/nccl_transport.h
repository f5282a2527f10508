// Messages over NCCL: a round of a plan is one group of sends and receives on the transport's own
// stream; it is complete when an event behind it is. By order, with notes (note.h) that tell
// whether both sides mean the same. Messages that a native collective stands for are that call.
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
#include "transports/nccl/cuda_calls.h"
#include "transports/nccl/note.h"
#include "transports/nccl/poller.h"

namespace sotto::nccl {

class NcclTransport final : public Transport, private PollSource {
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
  void ready(int32_t, const OpPosting&, uint32_t, uint64_t) override {}
  void restart(const OpPosting& op) override;
  void unrecord(const OpPosting& op) override;
  bool idle() const override { return groups_.empty(); }
  Status verify(const OpPosting& op) override;
  void retire(const OpPosting& op) override;
  void cancel(const OpPosting& op) override;
  void send(Transfer& transfer) override { refuse(transfer); }
  void recv(Transfer& transfer) override { refuse(transfer); }
  Status issue(std::span<Transfer* const> group, Device* device, uint32_t lane) override;
  std::string route(int32_t peer) const override;
  TransferCounters counters(uint64_t comm, int32_t peer) const override;
  void close(Deadline deadline) override;

 private:
  // Pinned memory that stands for the caller's.
  struct Staged {
    void* memory;
    std::byte* at;
    uint64_t bytes;
    bool received;
  };
  // A message, or a native collective, and where NCCL finds its memory.
  struct Action {
    const Transfer* transfer;
    void* in = nullptr;  // of a message, which is `in` alone
    void* out = nullptr;
  };
  struct PeerNote {
    int32_t peer;
    Note mine;
    std::byte* out;
    std::byte* in;
    Status meant;  // once seen: whether the peer means the same
    bool seen = false;
  };
  // How far a group is on its way to the stream. NCCL queues in the background: the first use of a
  // connection takes until the peer has issued its part.
  enum class Stage : uint8_t { kNew, kMessages, kNatives, kQueued };
  // What was issued together and is not complete.
  struct Group {
    cudaStream_t stream = nullptr;
    bool reports = false;              // through on_transfer; else the engine has events of its own
    std::vector<OpKey> keys;           // of the operations
    std::vector<Transfer*> transfers;  // while `reports` or being issued
    std::vector<Action> messages, natives;
    const Communicator* natives_on = nullptr;
    std::vector<Staged> staged;
    std::vector<PeerNote> notes;
    std::byte* note_memory = nullptr;  // pinned, for all of them
    cudaEvent_t event = nullptr;       // behind all of it, once that is queued
    Stage stage = Stage::kNew;
    const OpPosting* recorded = nullptr;  // what is in a graph: its operation, known by this place
    bool executing = false;               // a launch of that is awaited
  };

  NcclTransport(std::unique_ptr<Communicator> communicator, std::shared_ptr<NcclPoller> poller,
                const ControlPlane& control, TransferSink& sink, const Clock& clock,
                const NcclOptions& options);
  bool run() override;
  bool busy() const override;
  void refuse(Transfer& transfer);

  static Status closed();
  static Status rank_is_gone();
  Result<cudaStream_t> stream_of(const Device& device, uint32_t lane) const;
  Group& new_group(cudaStream_t stream);
  Status prepare(std::span<Transfer* const> transfers, Group* group);
  Result<Action> message(const Transfer& transfer, Group* group);
  Result<Action> native(const Transfer& transfer, Group* group);
  uint64_t notes_bytes() const { return 2 * sizeof(Note) * static_cast<uint64_t>(size_ - 1); }
  static void write_note(const PeerNote& note);
  Status note_for(int32_t peer, std::span<Transfer* const> transfers, Group* group);
  Result<void*> reachable(void* memory, uint64_t bytes, bool received, Group* group);
  Status launch(Group& group);
  Status together(const Group& group, const Communicator& on,
                  Status (NcclTransport::*queue)(const Group&) const) const;
  Status queue_messages(const Group& group) const;
  Status queue_natives(const Group& group) const;
  const Communicator& communicator_of(uint64_t comm) const;
  Status check_communicators() const;
  const PeerNote* look_at_notes(Group& group);
  template <class Visit>
  void visit_recorded(const OpPosting& op, Visit&& visit);
  void complete(Group& group);
  void release(Group& group);
  void watch();
  void fail(int32_t peer, const Status& status);
  void stop();
  void abort_communicators();
  void count(const Transfer& transfer);
  void count_note(int32_t peer, bool sent);

  const std::unique_ptr<Communicator> communicator_;  // of all ranks
  // Of those that were joined, by the comm's epoch; and those that end.
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
  std::list<Group> groups_;    // all but the last are queued
  std::list<Group> spare_;     // with the memory of their vectors, for the next ones
  std::list<Group> recorded_;  // until they are forgotten: graphs have their memory
  std::vector<std::pair<OpKey, Status>> differing_;  // operations of groups that were stopped
  bool failed_ = false;
  int64_t next_watch_ns_ = 0;
  int64_t remote_error_ns_ = 0;  // when NCCL first said that a rank is gone; 0: it has not

  mutable std::mutex counters_mutex_;
  std::map<std::pair<uint64_t, int32_t>, TransferCounters> counters_;  // comm epoch, peer
};

}  // namespace sotto::nccl
