// The data connections to one peer: the order of messages, flow control by credit and READY, and
// the receives of arriving messages. A message carries its match key, so any connection may carry
// it: the first one with room takes the next message. With several connections the first carries
// small messages only. So they wait neither for the end of a large message nor behind what the
// kernel holds of it.
//
// Flow control. A message of at most eager_bytes is sent at once while its frame fits into the
// credit that the receiver has granted. The receiver returns credit in portions, as messages leave
// for their receives. Any other message waits for the receiver's READY for its operation and round.
// Then its receive is posted, and it needs no credit. The receiver sends READY when it expects
// messages above eager_bytes, and for all messages while so much credit is out that the sender may
// have none left. A sender that waits long for a READY announces its operation, which shows a
// mismatch to a receiver that calls something else.
//
// Memory per peer: the credit, for messages that came before their receive, and the small frames of
// flow control. Those are at most one READY per round and one announcement of each operation, and
// one credit frame per quarter of the credit.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/iface/transport.h"
#include "core/wire/control.h"
#include "transports/tcp/counters.h"
#include "transports/tcp/op_table.h"
#include "transports/tcp/send_queue.h"
#include "transports/tcp/stream.h"

namespace sotto::tcp {

struct FlowLimits {
  uint64_t eager_bytes = 65536;      // equal on all ranks of a group
  uint64_t credit_bytes = 1u << 20;  // of whole frames
  uint32_t connections = 1;          // to each peer; equal on all ranks of a group
};

// Events of data links for the control plane.
class FailureListener {
 public:
  virtual ~FailureListener() = default;
  // The payload of a failure frame. An error breaks the connection.
  virtual Status on_failure_frame(int32_t peer, wire::Bytes payload) = 0;
  // The last data connection to the peer has ended.
  virtual void on_disconnected(int32_t peer) = 0;
};

// What the data links of one transport share.
struct TransportCore {
  TransportCore(int32_t rank_number, int32_t ranks, TransferSink& s, FlowLimits l, Reactor& r)
      : rank(rank_number), sink(s), limits(l), reactor(r), counters(ranks) {
    ops.set_peers(ranks);
  }
  int32_t rank;
  TransferSink& sink;
  FlowLimits limits;
  Reactor& reactor;
  CounterTable counters;
  OpTable ops;
  FailureListener* failures = nullptr;  // null: refuses failure frames
  std::string name;                     // of this rank, for errors about connections
};

// A first-in-first-out queue whose memory grows to its longest length.
class FrameRing {
 public:
  bool empty() const { return count_ == 0; }
  void push(const wire::FrameHeader& frame);
  const wire::FrameHeader& front() const { return frames_[first_]; }
  void pop();

 private:
  std::vector<wire::FrameHeader> frames_;
  size_t first_ = 0, count_ = 0;
};

class DataLink final : public StreamOwner {
 public:
  // streams: at least one, after the handshake. name: of the peer, for errors.
  DataLink(TransportCore& core, int32_t peer, std::vector<std::unique_ptr<FrameStream>> streams,
           std::string name);

  void send(Transfer& transfer);
  void recv(Transfer& transfer);
  void ready(const OpPosting& op, uint32_t last_round, uint64_t largest);
  // Compares the peer's signature of the operation with the posting.
  void check_posted(Flow& flow);
  void cancel(OpState& op);
  // The operation is complete. PROTOCOL if a message of it is arriving.
  void retire(const OpState& op);
  void send_bye();
  // Sends a failure frame before all that waits.
  void send_failure(std::string payload);
  // All failure frames were handed to the network, or never will be.
  bool failure_sent() const;
  // At least one connection to the peer is open.
  bool connected() const { return any_open(); }

  // Reports a loss for which the control plane has named no other cause. Announces operations that
  // have waited long.
  void tick(int64_t now_ns);

  bool delivered() const;
  void close();
  // Of the first connection.
  const std::string& address() const { return connections_[0].stream->name(); }

 private:
  // One connection, and the message that arrives on it.
  struct Connection {
    std::unique_ptr<FrameStream> stream;
    Flow* flow = nullptr;  // null: none, or of a cancelled operation
    Transfer* transfer = nullptr;
    Unexpected* unexpected = nullptr;
    bool small_only = false;
    bool bye_due = false;       // to be sent when nothing else waits
    bool bye_received = false;  // the last frame of the peer
    std::string inbox;          // of a failure frame
  };

  Connection& connection_of(const FrameStream& stream);
  void flush();
  bool any_open() const;
  bool can_send() const;
  Result<PayloadPlace> on_header(FrameStream& stream, const wire::FrameHeader& header) override;
  Status on_frame(FrameStream& stream, const wire::FrameHeader& header) override;
  bool next_frame(FrameStream& stream, OutFrame& out) override;
  void on_sent(FrameStream& stream, const OutFrame& out) override;
  void on_broken(FrameStream& stream, Status why) override;

  Result<void*> begin_message(Connection& connection, const wire::FrameHeader& header);
  Result<void*> place_message(Connection& connection, const wire::FrameHeader& header);
  Status end_message(Connection& connection, const wire::FrameHeader& header);
  Status on_ready(const wire::FrameHeader& header);
  Status on_credit(const wire::FrameHeader& header);
  Status on_announce(const wire::FrameHeader& header);
  Result<Flow*> flow_of_frame(const wire::FrameHeader& header);
  Status agree(const OpKey& op, const OpSignature& own, const OpSignature& theirs) const;

  Flow& flow(const OpKey& op);
  bool admit(const Flow& flow, Transfer& t);
  void release_waiting(Flow& flow);
  void release_all_waiting();
  void send_ready(Flow& flow);
  void send_control(const wire::FrameHeader& frame);
  Status take_credit(const wire::FrameHeader& header);
  void return_credit(uint64_t cost);
  bool sender_may_be_dry() const { return credit_out_ >= core_.limits.credit_bytes / 8 * 3; }
  void deliver(Flow& flow, Transfer& t, Unexpected& message);
  void complete(Flow& flow, Transfer& t);
  void drop_incoming(Connection& connection);
  void fail(Status why);
  void fail_if_needed();
  Status connection_status(Code code, std::string_view what, const Status& why) const;

  TransportCore& core_;
  const int32_t peer_;
  const std::string name_;
  std::vector<Connection> connections_;
  PeerCounters& service_counters_;

  SendQueue queue_;
  FrameRing service_;
  uint64_t credit_;                   // bytes that this rank may still send
  size_t waiting_flows_ = 0;          // flows with sends that wait
  std::vector<Flow*> release_order_;  // of release_all_waiting; a member for its memory
  uint64_t credit_out_ = 0;           // bytes that the peer has used and not got back
  uint64_t credit_consumed_ = 0;      // of these: messages that have left for their receive

  std::deque<std::string> failures_;  // payloads of failure frames
  bool failure_sending_ = false;      // the first of them is being sent
  bool bye_sent_ = false;
  bool failed_ = false;
  std::optional<Status> lost_;  // PEER_LOST, held back for a moment
  int64_t lost_ns_ = 0;
};

}  // namespace sotto::tcp
