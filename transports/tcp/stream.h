// A connected socket that carries frames: it receives their payloads where the owner says, and
// sends the owner's frames in turn, without a copy.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/status.h"
#include "core/wire/frame.h"
#include "transports/framed/carrier.h"
#include "transports/framed/frame_reader.h"
#include "transports/framed/frame_writer.h"
#include "transports/tcp/reactor.h"
#include "transports/tcp/send_window.h"

namespace sotto::tcp {

class FrameStream;

using framed::OutFrame;

// The memory for the payload of a frame.
struct PayloadPlace {
  uint8_t* data = nullptr;  // null: discard
  // Bytes that have a place now. Less than payload_bytes: more_room is called when these are full.
  // So memory follows what has arrived, not what a header announces.
  uint64_t room = 0;
};

// Requests and events of a stream. The owner may call close() inside any of these, but not destroy
// the stream.
class StreamOwner {
 public:
  virtual ~StreamOwner() = default;
  // A frame begins. An error is reported through on_broken.
  virtual Result<PayloadPlace> on_header(FrameStream& stream, const wire::FrameHeader& header) = 0;
  // The room is full. Returns the new place of the whole payload, with its first `arrived` bytes,
  // and a larger room. Only for owners that give less than payload_bytes.
  virtual PayloadPlace more_room(FrameStream& stream, const wire::FrameHeader& header,
                                 uint64_t arrived);
  // The frame is complete and its checksum is right.
  virtual Status on_frame(FrameStream& stream, const wire::FrameHeader& header) = 0;
  // The next frame to send, if there is one.
  virtual bool next_frame(FrameStream& stream, OutFrame& out) = 0;
  virtual void on_sent(FrameStream& stream, const OutFrame& out) = 0;
  // The connection has failed. PROTOCOL: by what arrived; FrameStream::damaged: damaged on the way.
  // PEER_LOST: closed or reset. Called once.
  virtual void on_broken(FrameStream& stream, Status why) = 0;
};

class FrameStream final : public Pollable {
 public:
  // Takes the descriptor of a connected socket. `name` is the peer's address, for errors.
  static Result<std::unique_ptr<FrameStream>> make(Reactor& reactor, int fd, std::string name,
                                                   StreamOwner& owner);
  ~FrameStream() override;

  // Sends the owner's frames, as far as the socket takes them.
  void flush();
  // peer: its name, for errors about what it sent; until then these have its address.
  void set_owner(StreamOwner& owner, std::string peer) {
    owner_ = &owner;
    reader_.set_peer(std::move(peer));
  }
  // Keepalive and the time limit of acknowledgements (SocketSettings::watch).
  void watch() { reactor_.sockets().watch(fd_); }
  // No frames are read or handed out until resume. Legal inside a callback.
  void pause() { paused_ = true; }
  void resume();
  // Reads what has arrived, before the connection is closed because nothing came.
  void look();
  void close();
  // Too little is sent to measure the path: the send window stays as it is.
  void carries_little() { window_.stop(); }
  // Sends no more frames; those that were sent still arrive.
  void shutdown_send();
  // Forgets a frame that is being sent or received: its memory is not accessed any more. After half
  // a frame nothing can be sent on the connection.
  void drop_out();
  void discard_in() { reader_.discard(); }
  const Transfer* sending() const { return writer_.busy() ? writer_.frame().message : nullptr; }

  bool open() const { return fd_ >= 0; }
  bool idle() const { return !writer_.busy(); }
  // The peer's kernel has all that was sent.
  bool delivered() const;
  // Frames can still be sent.
  bool can_send() const { return fd_ >= 0 && !out_dead_; }
  // Bytes were damaged on the way: a checksum is wrong, or there is no frame where one has to be.
  bool damaged() const { return damaged_; }
  // The peer's host has not answered for too long (TCP_USER_TIMEOUT, keepalive, routing).
  bool unanswered() const { return unanswered_; }
  const std::string& name() const { return name_; }
  int64_t last_heard_ns() const { return last_heard_ns_; }

  bool serve(uint32_t events) override;

 private:
  FrameStream(Reactor& reactor, int fd, std::string name, StreamOwner& owner);
  bool receive();
  uint64_t receive_once(uint64_t allowed);
  bool parse();
  bool begin_frame();
  bool damage();
  void show_version();
  bool settle(const Status& status);
  bool send();
  bool begin_out();
  int64_t send_once(uint64_t allowed);
  void fail(Status why);
  void fail_errno(const char* call, int number);

  Reactor& reactor_;
  int fd_;
  std::string name_;
  StreamOwner* owner_;
  bool readable_ = false, writable_ = true;
  bool hung_up_ = false;   // closed by the peer, behind what can still be read
  bool out_dead_ = false;  // no frame can be sent
  bool damaged_ = false;
  bool unanswered_ = false;
  bool in_send_ = false;
  bool paused_ = false;
  int64_t last_heard_ns_;
  framed::FrameReader reader_;
  framed::FrameWriter writer_;
  SendWindow window_;
};

}  // namespace sotto::tcp
