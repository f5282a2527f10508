// The handshake of one data connection: a hello in each direction, of the end that has connected
// first. It keeps the stream, paused, until somebody takes it.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/wire/control.h"
#include "transports/tcp/stream.h"

namespace sotto::tcp {

inline constexpr uint64_t kMaxHelloBytes = 64;

// Of a hello to a rank: an address may lead to another one.
inline uint32_t round_of(int32_t peer) { return static_cast<uint32_t>(peer) + 1; }

class Handshake;

// Called inside the stream of the handshake, which is therefore not destroyed there.
class HandshakeOwner {
 public:
  virtual ~HandshakeOwner() = default;
  // The answer of the rank to which this one has connected.
  virtual Status on_answer(Handshake& handshake, const wire::Hello& hello) = 0;
  // This rank's own hello was sent, to a rank that has connected.
  virtual void on_greeted(Handshake& handshake) = 0;
  virtual void on_handshake_broken(Handshake& handshake, const Status& why) = 0;
};

class Handshake final : public StreamOwner {
 public:
  // number: of the connection among those to the peer, the segment of its hello. connects: this
  // rank greets first.
  Handshake(HandshakeOwner& owner, const wire::Hello& own, int32_t peer, uint32_t number,
            bool connects)
      : owner_(owner), peer_(peer), number_(number), connects_(connects), outbox_(own.encode()) {}

  int32_t peer() const { return peer_; }
  uint32_t number() const { return number_; }
  // Both hellos are done.
  bool over() const { return over_; }
  // Sends the hello.
  void start(std::unique_ptr<FrameStream> stream);
  const FrameStream& stream() const { return *stream_; }
  // Without a word to the owner.
  void close() { stream_->close(); }
  // Once, when it is over.
  std::unique_ptr<FrameStream> take() { return std::move(stream_); }

 private:
  Result<PayloadPlace> on_header(FrameStream& s, const wire::FrameHeader& header) override;
  Status on_frame(FrameStream& s, const wire::FrameHeader& header) override;
  bool next_frame(FrameStream& s, OutFrame& out) override;
  void on_sent(FrameStream& s, const OutFrame& out) override;
  void on_broken(FrameStream& s, Status why) override;

  HandshakeOwner& owner_;
  const int32_t peer_;
  const uint32_t number_;
  const bool connects_;
  bool to_send_ = false, over_ = false;
  std::unique_ptr<FrameStream> stream_;
  std::string inbox_, outbox_;
};

}  // namespace sotto::tcp
