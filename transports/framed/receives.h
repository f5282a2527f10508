// The receives of a link: each arriving message finds its own by operation, round and segment. A
// message that comes before its receive waits in memory of the operation table; all others go where
// the receive says.
//
// Threads: the driving thread.
#pragma once

#include "transports/framed/flow_control.h"
#include "transports/framed/peer.h"

namespace sotto::framed {

// The message that arrives on one carrier. All null: none, or one of a cancelled operation.
struct Arrival {
  Flow* flow = nullptr;
  Transfer* transfer = nullptr;      // its receive
  Unexpected* unexpected = nullptr;  // its memory, if it came before the receive
};

class Receives {
 public:
  Receives(Peer& peer, FlowControl& flow_control) : peer_(peer), flow_control_(flow_control) {}

  void recv(Transfer& receive);
  // A message begins: where its payload goes.
  Result<uint8_t*> begin(Arrival& arrival, const wire::FrameHeader& header);
  // It is complete.
  void end(Arrival& arrival, const wire::FrameHeader& header);
  // Forgets it.
  void drop(Arrival& arrival);

 private:
  Result<uint8_t*> place(Arrival& arrival, const wire::FrameHeader& header);
  void deliver(Flow& flow, Transfer& receive, Unexpected& message);
  void complete(Flow& flow, Transfer& receive);

  Peer& peer_;
  FlowControl& flow_control_;
};

}  // namespace sotto::framed
