// A frame carrier takes whole frames to one peer and brings whole frames from it, in each direction
// in order and without loss: a socket, active messages, a ring in shared memory, an encrypted
// stream. How a frame is written and how damage is found is the carrier's own. What frames mean
// (matching, flow control, counters, failure) is the same over every carrier.
//
// Sending is pulled: a carrier with room asks its owner for the next frame. So the order is decided
// when a frame can leave, and an urgent one waits only behind what has been begun. Receiving is
// without a copy where the carrier can: the owner names the place of a payload when its header has
// come.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/status.h"
#include "core/wire/frame.h"

namespace sotto::framed {

// A frame to send. The payload stays where it is until on_sent or drop_out.
struct OutFrame {
  wire::FrameHeader header;
  const uint8_t* payload = nullptr;
  Transfer* message = nullptr;  // null: not a message of an operation
};

// Requests and events of a carrier. Each function of the carrier may be called inside any of these;
// its end may not.
class FrameOwner {
 public:
  virtual ~FrameOwner() = default;
  // A frame begins. Returns the place of its payload; null: the payload is discarded. An error ends
  // the carrier and comes back through on_broken.
  virtual Result<uint8_t*> on_header(const wire::FrameHeader& header) = 0;
  // The frame is complete, and as it was sent. An error: as in on_header.
  virtual Status on_frame(const wire::FrameHeader& header) = 0;
  // The next frame to send, if there is one.
  virtual bool next_frame(OutFrame& out) = 0;
  // The frame was handed over completely: its payload is not read any more.
  virtual void on_sent(const OutFrame& out) = 0;
  // The carrier has failed and is closed. Called once. PEER_LOST: the peer is gone, or the way to
  // it. PROTOCOL: by what arrived; damaged: on the way, and not by what the peer sent.
  virtual void on_broken(Status why, bool damaged) = 0;
};

class FrameCarrier {
 public:
  virtual ~FrameCarrier() = default;
  // Frames arrive and are asked for from now on. peer: its name, for errors about what it sent.
  // small_only: small messages alone will be sent on this carrier. The owner outlives it.
  virtual void start(FrameOwner& owner, const std::string& peer, bool small_only) = 0;
  // Asks for frames as long as there is room. Inside an event it may be put off to its end. A
  // carrier that connects when it is first used does so now.
  virtual void flush() = 0;
  // Ends the carrier without an event.
  virtual void close() = 0;
  // The message that is being sent; null: none.
  virtual const Transfer* sending() const = 0;
  // Forgets what is being sent, or received: its memory is not accessed any more. A carrier that
  // cannot take back half a frame sends nothing afterwards. The rest of a dropped frame that
  // arrives is discarded, and on_frame still called.
  virtual void drop_out() = 0;
  virtual void drop_in() = 0;

  virtual bool open() const = 0;
  // Frames can still be sent. False also of a carrier that was never used.
  virtual bool can_send() const = 0;
  // The peer's end has all that was sent, or nothing can be sent any more.
  virtual bool delivered() const = 0;
  // For reports: "127.0.0.1:4242".
  virtual std::string address() const = 0;
};

}  // namespace sotto::framed
