// One control connection: whole messages over a FrameStream.
//
// Threads: the driving thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "core/wire/control.h"
#include "core/wire/frame.h"
#include "transports/tcp/stream.h"

namespace sotto::tcp {

class ControlLink;

// Bytes of whole frames on one connection. Threads: any reads.
struct LinkBytes {
  std::atomic<uint64_t> sent{0}, received{0};
};

class ControlLinkOwner {
 public:
  virtual ~ControlLinkOwner() = default;
  // An error is passed on to on_lost. Neither may destroy the link.
  virtual Status on_message(ControlLink& link, wire::FrameKind kind, wire::Bytes payload) = 0;
  // The connection was closed or reset, or what came is no control frame. Called once, and not
  // after the peer's bye.
  virtual void on_lost(ControlLink& link, const Status& why) = 0;
};

class ControlLink final : public StreamOwner {
 public:
  // Takes the descriptor. Refuses messages of more than max_payload bytes.
  static Result<std::unique_ptr<ControlLink>> make(Reactor& reactor, int fd, std::string name,
                                                   ControlLinkOwner& owner, uint64_t max_payload);
  // Takes a connection whose first frame has been read.
  static std::unique_ptr<ControlLink> adopt(std::unique_ptr<FrameStream> stream,
                                            const wire::FrameHeader& first, ControlLinkOwner& owner,
                                            uint64_t max_payload);
  ~ControlLink() override;

  void set_owner(ControlLinkOwner& owner) { owner_ = &owner; }
  void set_max_payload(uint64_t bytes) { max_payload_ = bytes; }
  void send(wire::FrameKind kind, std::string payload);
  // All messages were handed to the network.
  bool flushed() const { return outbox_.empty() && stream_->idle(); }
  // The peer's kernel has all messages, or the connection is closed.
  bool delivered() const { return !stream_->open() || (outbox_.empty() && stream_->delivered()); }
  bool open() const { return stream_->open(); }
  bool damaged() const { return stream_->damaged(); }
  bool unanswered() const { return stream_->unanswered(); }
  bool bye_received() const { return bye_received_; }
  void close() { stream_->close(); }
  // Reads what has come.
  void look() { stream_->look(); }
  // Gives away the connection, on which nothing has been sent.
  std::unique_ptr<FrameStream> release() { return std::move(stream_); }
  const std::string& name() const { return stream_->name(); }
  int64_t last_heard_ns() const { return stream_->last_heard_ns(); }
  std::shared_ptr<const LinkBytes> bytes() const { return bytes_; }

  int32_t rank = -1;  // the peer's, for the owner

 private:
  ControlLink(ControlLinkOwner& owner, uint64_t max_payload)
      : owner_(&owner), max_payload_(max_payload) {}
  Result<PayloadPlace> on_header(FrameStream& stream, const wire::FrameHeader& header) override;
  PayloadPlace more_room(FrameStream& stream, const wire::FrameHeader& header,
                         uint64_t arrived) override;
  Status on_frame(FrameStream& stream, const wire::FrameHeader& header) override;
  bool next_frame(FrameStream& stream, OutFrame& out) override;
  void on_sent(FrameStream& stream, const OutFrame& out) override;
  void on_broken(FrameStream& stream, Status why) override;

  struct OutMessage {
    wire::FrameKind kind;
    std::string payload;
  };
  ControlLinkOwner* owner_;
  uint64_t max_payload_;
  std::unique_ptr<FrameStream> stream_;
  std::deque<OutMessage> outbox_;  // the first one in progress
  std::string inbox_;
  bool bye_received_ = false;
  std::shared_ptr<LinkBytes> bytes_ = std::make_shared<LinkBytes>();
};

}  // namespace sotto::tcp
