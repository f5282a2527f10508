#include "transports/tcp/control_link.h"

namespace sotto::tcp {

Result<std::unique_ptr<ControlLink>> ControlLink::make(Reactor& reactor, int fd, std::string name,
                                                       ControlLinkOwner& owner,
                                                       uint64_t max_payload) {
  std::unique_ptr<ControlLink> link(new ControlLink(owner, max_payload));
  SOTTO_ASSIGN(link->stream_, FrameStream::make(reactor, fd, std::move(name), *link));
  return link;
}

ControlLink::~ControlLink() = default;

void ControlLink::send(wire::FrameKind kind, std::string payload) {
  if (!stream_->open()) return;
  outbox_.push_back({kind, std::move(payload)});
  stream_->flush();
}

Result<void*> ControlLink::on_header(FrameStream& /*stream*/, const wire::FrameHeader& header) {
  if (header.kind < wire::FrameKind::kJoin || header.payload_bytes > max_payload_) {
    return error(Code::kProtocol,
                 "{} on a control connection from {}; at most {} bytes are allowed",
                 describe(header), name(), max_payload_);
  }
  inbox_.resize(header.payload_bytes);
  return static_cast<void*>(inbox_.data());
}

Status ControlLink::on_frame(FrameStream& /*stream*/, const wire::FrameHeader& header) {
  bytes_->received.fetch_add(wire::frame_bytes(header.payload_bytes), std::memory_order_relaxed);
  if (header.kind == wire::FrameKind::kBye) bye_received_ = true;
  return owner_->on_message(*this, header.kind,
                            {reinterpret_cast<const uint8_t*>(inbox_.data()), inbox_.size()});
}

bool ControlLink::next_frame(FrameStream& /*stream*/, OutFrame& out) {
  if (outbox_.empty()) return false;
  const Message& message = outbox_.front();
  out = OutFrame{};
  out.header.kind = message.kind;
  out.header.payload_bytes = message.payload.size();
  out.payload = reinterpret_cast<const uint8_t*>(message.payload.data());
  return true;
}

void ControlLink::on_sent(FrameStream& /*stream*/, const OutFrame& out) {
  bytes_->sent.fetch_add(wire::frame_bytes(out.header.payload_bytes), std::memory_order_relaxed);
  outbox_.pop_front();
}

void ControlLink::on_broken(FrameStream& /*stream*/, Status why) {
  outbox_.clear();
  if (!bye_received_) owner_->on_lost(*this, why);
}

}  // namespace sotto::tcp
