// What a link sends, and the carriers that take it: failure frames, then flow control, then
// messages, then the bye. Any carrier with room takes the next frame. Of several carriers the first
// takes small messages only. So they wait neither for the end of a large message nor behind what is
// under way of it.
//
// Threads: the driving thread.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transports/framed/carrier.h"
#include "transports/framed/send_queue.h"

namespace sotto::framed {

// Transfer::scratch of a send: the flags of its frame.
inline constexpr size_t kFlagsSlot = 0;

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

class Sender {
 public:
  // At least one carrier. background_share: as SendQueue says.
  Sender(std::vector<std::unique_ptr<FrameCarrier>> carriers, uint32_t background_share);

  FrameCarrier& carrier(size_t number) const { return *routes_[number].carrier; }
  size_t carriers() const { return routes_.size(); }
  // The first of several.
  bool small_only(size_t number) const { return number == 0 && routes_.size() > 1; }

  // The message goes with the next flush.
  void queue(Transfer& message) { queue_.push(message); }
  // Sends a frame of flow control.
  void send_control(const wire::FrameHeader& frame);
  // The last frames, on every carrier.
  void send_bye();
  void send_failure(std::string payload);
  void flush();
  // No message of the operation is sent, or accessed, any more.
  void cancel(const OpDescriptor& op);
  void close();

  // The next frame for a carrier, if there is one.
  bool next(size_t number, OutFrame& out);
  // Of a frame that is no message.
  void sent(const OutFrame& out);

  bool any_open() const;
  bool can_send() const;
  bool bye_sent() const { return bye_sent_; }
  bool has_messages() const { return !queue_.empty(); }
  // All failure frames were handed to the network, or never will be.
  bool failure_sent() const { return failures_.empty() || !can_send(); }
  // The peer has everything, or nothing can be sent any more.
  bool delivered() const;

 private:
  // The first failure frame is on its way. Where its carrier ends before, another one takes it.
  bool failure_sending() const { return failure_on_ && routes_[*failure_on_].carrier->can_send(); }

  struct Route {
    std::unique_ptr<FrameCarrier> carrier;
    bool bye_due = false;  // to be sent when nothing else waits
  };

  std::vector<Route> routes_;
  SendQueue queue_;
  FrameRing service_;
  std::deque<std::string> failures_;  // payloads
  std::optional<size_t> failure_on_;  // the first of them is being sent on this carrier
  bool bye_sent_ = false;
};

}  // namespace sotto::framed
