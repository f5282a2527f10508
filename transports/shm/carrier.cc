#include "transports/shm/carrier.h"

namespace sotto::shm {
namespace {

// Bytes of one turn, so that one busy peer does not keep the others waiting.
constexpr uint64_t kTurnBytes = 1 << 20;

}  // namespace

RingCarrier::RingCarrier(std::shared_ptr<ShmPoller> poller, PeerRings rings)
    : poller_(std::move(poller)), rings_(std::move(rings)), out_(rings_.out), in_(rings_.in) {}

RingCarrier::~RingCarrier() { close(); }

void RingCarrier::start(framed::FrameOwner& owner, const std::string& peer, bool /*small_only*/) {
  owner_ = &owner;
  peer_ = peer;
  reader_.set_peer(peer);
  poller_->add(*this);
}

void RingCarrier::close() {
  if (!std::exchange(open_, false)) return;
  poller_->remove(*this);
  out_.close();
  rings_.bell.ring();
}

void RingCarrier::fail(const Status& why, bool damaged) {
  close();
  owner_->on_broken(why, damaged);
}

void RingCarrier::drop_out() {
  if (writer_.drop()) out_dead_ = true;
}

std::string RingCarrier::address() const {
  return rings_.pid > 0 ? fmt::format("pid {}", rings_.pid) : "pid of another namespace";
}

bool RingCarrier::serve() {
  more_ = false;
  const bool received = receive();
  const bool sent = open_ && !in_send_ && send();
  return received || sent;
}

bool RingCarrier::has_work() const {
  return more_ || in_.has_bytes() || (can_send() && writer_.busy() && out_.has_room());
}

bool RingCarrier::arm() {
  if (more_ || !in_.wait()) return false;
  return !can_send() || !writer_.busy() || out_.wait();
}

void RingCarrier::disarm() {
  in_.stop_waiting();
  out_.stop_waiting();
}

// ---- receiving

bool RingCarrier::receive() {
  uint64_t taken = 0;
  while (open_) {
    framed::FrameReader::Parts parts;
    const size_t count = reader_.parts(kTurnBytes, parts);
    const Result<uint64_t> bytes = in_.read({parts.data(), count});
    if (!bytes.ok()) {
      fail(bytes.status().with_prefix(fmt::format("from {}", peer_)), true);
      return true;
    }
    if (*bytes == 0) break;
    taken += *bytes;
    reader_.arrived(*bytes);
    if (!parse()) return true;
    if (taken >= kTurnBytes) {
      more_ = true;
      break;
    }
  }
  if (taken > 0) {
    if (in_.take_waiting()) rings_.bell.ring();
  } else if (open_ && in_.ended()) {
    fail(error(Code::kPeerLost, "{} has closed the shared memory{}", peer_, reader_.where()),
         false);
    return true;
  }
  return taken > 0;
}

// Consumes what has arrived. False when the carrier is closed.
bool RingCarrier::parse() {
  using Event = framed::FrameReader::Event;
  for (;;) {
    const Event event = reader_.next();
    if (event == Event::kStarved) return true;
    if (event == Event::kDamaged) {
      fail(reader_.why(), true);
      return false;
    }
    if (event == Event::kHeader) {
      const auto place = owner_->on_header(reader_.header());
      if (!settle(place.status())) return false;
      reader_.place(*place, reader_.header().payload_bytes);
    } else if (!settle(owner_->on_frame(reader_.header()))) {
      return false;
    }
  }
}

// Whether the carrier goes on after a call of the owner.
bool RingCarrier::settle(const Status& status) {
  if (open_ && !status.ok()) fail(status, false);
  return open_;
}

// ---- sending

void RingCarrier::flush() {
  if (open_ && owner_ != nullptr && !in_send_) send();
}

// True: something was sent.
bool RingCarrier::send() {
  uint64_t taken = 0;
  in_send_ = true;
  while (can_send()) {
    if (taken >= kTurnBytes) {
      more_ = true;
      break;
    }
    if (!writer_.busy()) {
      framed::OutFrame frame;
      if (!owner_->next_frame(frame)) break;
      writer_.begin(frame);
    }
    framed::FrameWriter::Parts parts;
    const size_t count = writer_.parts(kTurnBytes, parts);
    const Result<uint64_t> bytes = out_.write({parts.data(), count});
    if (!bytes.ok()) {
      fail(bytes.status().with_prefix(fmt::format("to {}", peer_)), true);
      break;
    }
    if (*bytes == 0) break;
    if (out_.take_waiting()) rings_.bell.ring();
    taken += *bytes;
    if (writer_.sent(*bytes)) {
      const framed::OutFrame sent = writer_.frame();
      owner_->on_sent(sent);
    }
  }
  in_send_ = false;
  return taken > 0;
}

}  // namespace sotto::shm
