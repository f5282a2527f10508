#include "transports/tcp/stream_carrier.h"

namespace sotto::tcp {

void StreamCarrier::start(framed::FrameOwner& owner, const std::string& peer, bool small_only) {
  owner_ = &owner;
  peer_ = peer;
  small_only_ = small_only;
  if (stream_) begin();
}

void StreamCarrier::begin() {
  if (small_only_) stream_->carries_little();
  stream_->set_owner(*this, peer_);
  stream_->resume();
}

void StreamCarrier::attach(std::unique_ptr<FrameStream> stream) {
  stream_ = std::move(stream);
  if (closed_) {  // not destroyed: it may be in an event
    stream_->close();
  } else if (owner_ != nullptr) {
    begin();
    stream_->flush();
  }
}

void StreamCarrier::fail(Status why) {
  if (stream_ || closed_) return;
  closed_ = true;
  owner_->on_broken(std::move(why), false);
}

void StreamCarrier::flush() {
  if (stream_) {
    stream_->flush();
  } else if (!closed_) {
    use_();
  }
}

void StreamCarrier::close() {
  closed_ = true;
  if (stream_) stream_->close();
}

}  // namespace sotto::tcp
