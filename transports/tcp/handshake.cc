#include "transports/tcp/handshake.h"

#include <utility>

#include "core/base/text.h"

namespace sotto::tcp {
namespace {

constexpr uint64_t kMaxRefusalBytes = wire::kMaxTextBytes + 64;

}  // namespace

void Handshake::start(std::unique_ptr<FrameStream> stream) {
  stream_ = std::move(stream);
  stream_->set_owner(*this, stream_->name());
  // A peer that greets first may send messages as soon as it is answered.
  if (!connects_) stream_->pause();
  to_send_ = true;
  stream_->flush();
}

Result<PayloadPlace> Handshake::on_header(FrameStream& s, const wire::FrameHeader& header) {
  const bool refusal = header.kind == wire::FrameKind::kFailure;
  if ((header.kind != wire::FrameKind::kHello && !refusal) ||
      header.payload_bytes > (refusal ? kMaxRefusalBytes : kMaxHelloBytes)) {
    return error(Code::kProtocol, "{} from {} instead of a hello", describe(header), s.name());
  }
  inbox_.resize(header.payload_bytes);
  return PayloadPlace{reinterpret_cast<uint8_t*>(inbox_.data()), inbox_.size()};
}

Status Handshake::on_frame(FrameStream& s, const wire::FrameHeader& header) {
  const wire::Bytes payload(reinterpret_cast<const uint8_t*>(inbox_.data()), inbox_.size());
  if (header.kind == wire::FrameKind::kFailure) {
    SOTTO_ASSIGN(const wire::Failure refusal, wire::Failure::decode(payload));
    return error(static_cast<Code>(refusal.code), "the peer refuses it: {}",
                 printable(refusal.text, 1000));
  }
  SOTTO_ASSIGN(const wire::Hello hello, wire::Hello::decode(payload));
  s.pause();  // as in start
  over_ = true;
  return owner_.on_answer(*this, hello);
}

bool Handshake::next_frame(FrameStream& /*s*/, OutFrame& out) {
  if (!std::exchange(to_send_, false)) return false;
  out = OutFrame{};
  out.header.kind = wire::FrameKind::kHello;
  out.header.round = round_of(peer_);
  out.header.segment = number_;
  out.header.payload_bytes = outbox_.size();
  out.payload = reinterpret_cast<const uint8_t*>(outbox_.data());
  return true;
}

void Handshake::on_sent(FrameStream& /*s*/, const OutFrame& /*out*/) {
  if (connects_) return;
  over_ = true;
  owner_.on_greeted(*this);
}

void Handshake::on_broken(FrameStream& /*s*/, Status why) {
  owner_.on_handshake_broken(*this, why);
}

}  // namespace sotto::tcp
