// When the messages of a link may be sent: credit and READY.
//
// A message of at most eager_bytes is sent at once while its frame fits into the credit that the
// receiver has granted. The receiver returns credit in portions, as messages leave for their
// receives. Any other message waits for the receiver's READY for its operation and round. Then its
// receive is posted, and it needs no credit. The receiver sends READY when it expects messages
// above eager_bytes, and for all messages while so much credit is out that the sender may have none
// left. A sender that waits long for a READY announces its operation, which shows a mismatch to a
// receiver that calls something else.
//
// Memory per peer: the credit, for messages that came before their receive, and the small frames of
// flow control. Those are at most one READY per round and one announcement of each operation, and
// one credit frame per quarter of the credit.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <vector>

#include "transports/framed/peer.h"
#include "transports/framed/sender.h"

namespace sotto::framed {

class FlowControl {
 public:
  FlowControl(Peer& peer, Sender& sender)
      : peer_(peer), sender_(sender), credit_(peer.core().limits.credit_bytes) {}

  // Sends the message, or keeps it until it may be sent.
  void send(Transfer& message);
  // The receives of the operation up to last_round are posted.
  void ready(const OpDescriptor& op, uint32_t last_round, uint64_t largest);
  // Forgets the messages of the flow that wait.
  void cancel(const Flow& flow);

  // Frames of the peer.
  Status on_ready(const wire::FrameHeader& header);
  Status on_credit(const wire::FrameHeader& header);
  Status on_announce(const wire::FrameHeader& header);
  // A message arrives; PROTOCOL: it exceeds the credit.
  Status take_credit(const wire::FrameHeader& header);
  // A message that cost so much has left for its receive.
  void return_credit(uint64_t cost);

  // Announces operations that have waited long, and reminds the peer of receives.
  void tick(int64_t now_ns);

 private:
  bool admit(const Flow& flow, Transfer& message);
  void release(Flow& flow);
  void release_all();
  void send_ready(Flow& flow);
  bool sender_may_be_dry() const { return credit_out_ >= limits().credit_bytes / 8 * 3; }
  const FlowLimits& limits() const { return peer_.core().limits; }

  Peer& peer_;
  Sender& sender_;
  uint64_t credit_;                   // bytes that this rank may still send
  size_t waiting_flows_ = 0;          // flows with messages that wait
  std::vector<Flow*> release_order_;  // of release_all; a member for its memory
  uint64_t credit_out_ = 0;           // bytes that the peer has used and not got back
  uint64_t credit_consumed_ = 0;      // of these: messages that have left for their receive
};

}  // namespace sotto::framed
