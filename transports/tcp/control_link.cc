#include "transports/tcp/control_link.h"

#include <algorithm>

namespace sotto::tcp {
namespace {

// First room for the payload of a message; it doubles as the payload arrives.
constexpr uint64_t kFirstRoom = 64 * 1024;
// Memory that is kept for the next message.
constexpr uint64_t kKeptRoom = 1024 * 1024;

}  // namespace

Result<std::unique_ptr<ControlLink>> ControlLink::make(Reactor& reactor, int fd, std::string name,
                                                       ControlLinkOwner& owner,
                                                       uint64_t max_payload) {
  std::unique_ptr<ControlLink> link(new ControlLink(owner, max_payload));
  SOTTO_ASSIGN(link->stream_, FrameStream::make(reactor, fd, std::move(name), *link));
  link->stream_->watch();
  return link;
}

std::unique_ptr<ControlLink> ControlLink::adopt(std::unique_ptr<FrameStream> stream,
                                                const wire::FrameHeader& first,
                                                ControlLinkOwner& owner, uint64_t max_payload) {
  std::unique_ptr<ControlLink> link(new ControlLink(owner, max_payload));
  link->bytes_->received = wire::frame_bytes(first.payload_bytes);
  link->stream_ = std::move(stream);
  link->stream_->set_owner(*link, link->stream_->name());
  link->stream_->watch();
  return link;
}

ControlLink::~ControlLink() = default;

void ControlLink::send(wire::FrameKind kind, std::string payload) {
  if (!stream_->open()) return;
  outbox_.push_back({kind, std::move(payload)});
  stream_->flush();
}

Result<PayloadPlace> ControlLink::on_header(FrameStream& /*stream*/,
                                            const wire::FrameHeader& header) {
  if (header.kind < wire::FrameKind::kJoin || header.payload_bytes > max_payload_) {
    return error(Code::kProtocol,
                 "{} on a control connection from {}; at most {} bytes are allowed",
                 describe(header), name(), max_payload_);
  }
  inbox_.resize(std::min(header.payload_bytes, kFirstRoom));
  return PayloadPlace{reinterpret_cast<uint8_t*>(inbox_.data()), inbox_.size()};
}

PayloadPlace ControlLink::more_room(FrameStream& /*stream*/, const wire::FrameHeader& header,
                                    uint64_t arrived) {
  inbox_.resize(std::min(header.payload_bytes, 2 * arrived));
  return {reinterpret_cast<uint8_t*>(inbox_.data()), inbox_.size()};
}

Status ControlLink::on_frame(FrameStream& /*stream*/, const wire::FrameHeader& header) {
  bytes_->received.fetch_add(wire::frame_bytes(header.payload_bytes), std::memory_order_relaxed);
  if (header.kind == wire::FrameKind::kBye) bye_received_ = true;
  Status status = owner_->on_message(
      *this, header.kind, {reinterpret_cast<const uint8_t*>(inbox_.data()), inbox_.size()});
  if (inbox_.capacity() > kKeptRoom) inbox_ = {};
  return status;
}

bool ControlLink::next_frame(FrameStream& /*stream*/, OutFrame& out) {
  if (outbox_.empty()) return false;
  const OutMessage& message = outbox_.front();
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
