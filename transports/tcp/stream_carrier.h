// A data connection as a carrier of frames.
//
// Threads: the driving thread.
#pragma once

#include <memory>
#include <string>

#include "transports/framed/carrier.h"
#include "transports/tcp/stream.h"

namespace sotto::tcp {

class StreamCarrier final : public framed::FrameCarrier, private StreamOwner {
 public:
  // The handshake is over, and the stream paused.
  explicit StreamCarrier(std::unique_ptr<FrameStream> stream) : stream_(std::move(stream)) {}

  void start(framed::FrameOwner& owner, const std::string& peer, bool small_only) override {
    owner_ = &owner;
    if (small_only) stream_->carries_little();
    stream_->set_owner(*this, peer);
    stream_->resume();
  }
  void flush() override { stream_->flush(); }
  void close() override { stream_->close(); }
  const Transfer* sending() const override { return stream_->sending(); }
  void drop_out() override { stream_->drop_out(); }
  void drop_in() override { stream_->discard_in(); }
  bool open() const override { return stream_->open(); }
  bool can_send() const override { return stream_->can_send(); }
  bool delivered() const override { return stream_->delivered(); }
  std::string address() const override { return stream_->name(); }

 private:
  Result<PayloadPlace> on_header(FrameStream& /*stream*/,
                                 const wire::FrameHeader& header) override {
    SOTTO_ASSIGN(uint8_t* const place, owner_->on_header(header));
    return PayloadPlace{place, header.payload_bytes};
  }
  Status on_frame(FrameStream& /*stream*/, const wire::FrameHeader& header) override {
    return owner_->on_frame(header);
  }
  bool next_frame(FrameStream& /*stream*/, OutFrame& out) override {
    return owner_->next_frame(out);
  }
  void on_sent(FrameStream& /*stream*/, const OutFrame& out) override { owner_->on_sent(out); }
  void on_broken(FrameStream& stream, Status why) override {
    owner_->on_broken(std::move(why), stream.damaged());
  }

  std::unique_ptr<FrameStream> stream_;
  framed::FrameOwner* owner_ = nullptr;  // until start: none is needed, the stream is paused
};

}  // namespace sotto::tcp
