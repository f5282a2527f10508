// A data connection as a carrier of frames. It may be made when it is first used.
//
// Threads: the driving thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "transports/framed/carrier.h"
#include "transports/tcp/stream.h"

namespace sotto::tcp {

class StreamCarrier final : public framed::FrameCarrier, private StreamOwner {
 public:
  // The handshake is over, and the stream paused.
  explicit StreamCarrier(std::unique_ptr<FrameStream> stream) : stream_(std::move(stream)) {}
  // use: called at the first use, and perhaps again until the stream is there.
  explicit StreamCarrier(std::function<void()> use) : use_(std::move(use)) {}

  // A stream will come: until then it counts as one that sends nothing yet.
  void expect() { expected_ = true; }
  // As in the constructor. Legal inside an event of the stream.
  void attach(std::unique_ptr<FrameStream> stream);
  // There will be no stream.
  void fail(Status why);
  bool connected() const { return stream_ != nullptr; }

  void start(framed::FrameOwner& owner, const std::string& peer, bool small_only) override;
  void flush() override;
  void close() override;
  const Transfer* sending() const override { return stream_ ? stream_->sending() : nullptr; }
  void drop_out() override {
    if (stream_) stream_->drop_out();
  }
  void drop_in() override {
    if (stream_) stream_->discard_in();
  }
  bool open() const override { return stream_ ? stream_->open() : !closed_; }
  bool can_send() const override { return stream_ ? stream_->can_send() : expected_ && !closed_; }
  bool delivered() const override { return stream_ ? stream_->delivered() : !can_send(); }
  std::string address() const override {
    return stream_ ? stream_->name() : "(connects when it is first used)";
  }

 private:
  void begin();
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

  std::unique_ptr<FrameStream> stream_;  // null: not connected
  std::function<void()> use_;            // null: it has been connected from the start
  framed::FrameOwner* owner_ = nullptr;  // until start: none is needed, the stream is paused
  std::string peer_;
  bool small_only_ = false;
  bool expected_ = false, closed_ = false;
};

}  // namespace sotto::tcp
