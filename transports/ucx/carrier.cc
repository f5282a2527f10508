#include "transports/ucx/carrier.h"

#include <algorithm>
#include <cstring>

#include "core/base/hash.h"
#include "core/base/text.h"

namespace sotto::ucx {
namespace {

// Bytes of one turn, so that one busy peer does not keep the others waiting.
constexpr uint64_t kTurnBytes = 1 << 20;

}  // namespace

MessageCarrier::MessageCarrier(std::shared_ptr<Endpoint> endpoint, std::string peer, uint64_t own,
                               uint64_t peers)
    : endpoint_(std::move(endpoint)),
      worker_(endpoint_->worker()),
      own_(own),
      peers_(peers),
      peer_(std::move(peer)) {
  worker_->add(own_, *this);
}

MessageCarrier::~MessageCarrier() { close(); }

void MessageCarrier::start(framed::FrameOwner& owner, const std::string& peer, bool small_only) {
  owner_ = &owner;
  peer_ = peer;
  small_only_ = small_only;
}

void MessageCarrier::close() {
  if (!std::exchange(open_, false)) return;
  worker_->remove(own_);
  end_transfers();
  for (const Arrived& arrived : in_.waiting) release(arrived);
  in_.waiting.clear();
  endpoint_->end_turn(this);
  endpoint_.reset();
}

// No memory of a transfer is accessed any more.
void MessageCarrier::end_transfers() {
  if (out_.request == nullptr && in_.request == nullptr && taken_.request == nullptr) return;
  endpoint_->drop();
  for (void** request : {&out_.request, &in_.request, &taken_.request}) worker_->settle(*request);
}

void MessageCarrier::release(const Arrived& arrived) {
  if (arrived.held) worker_->release(arrived.data);
}

void MessageCarrier::fail(const Status& why, bool damaged) {
  if (in_take_) {
    broken_ = {why, damaged};
    return;
  }
  close();
  owner_->on_broken(why, damaged);
}

void MessageCarrier::drop_out() {
  if (out_.request == nullptr) return;
  endpoint_->drop();
  worker_->settle(out_.request);
  out_.frame.message = nullptr;  // nobody waits for it, whatever UCX does
}

void MessageCarrier::drop_in() {
  if (in_.request != nullptr && in_.place != nullptr) {
    endpoint_->drop();
    worker_->settle(in_.request);
  }
  in_.place = nullptr;
}

// ---- Events

// A frame whose turn it is goes to its place from where UCX has it. All others wait.
bool MessageCarrier::take(Arrived arrived) {
  if (arrived.head.number == kTaken) taken_.came = true;
  if (arrived.head.number == kTaken || !broken_.why.ok()) return false;
  if (arrived.rendezvous || arrived.head.number != in_.frames || in_.frame || owner_ == nullptr ||
      worker_->settling()) {
    const bool held = arrived.held;
    if (!held && arrived.bytes > 0) {
      arrived.own = std::make_unique_for_overwrite<uint8_t[]>(arrived.bytes);
      std::memcpy(arrived.own.get(), arrived.data, arrived.bytes);
      arrived.data = arrived.own.get();
    }
    in_.waiting.push_back(std::move(arrived));
    return held;
  }
  arrived.held = false;
  ++in_.frames;
  in_take_ = true;
  if (begin(arrived)) finish_frame();
  in_take_ = false;
  return false;
}

bool MessageCarrier::due() const {
  if (owner_ == nullptr) return false;
  return more_ || !broken_.why.ok() || (wants_turn_ && endpoint_->turn_is_free()) ||
         (in_.frame && worker_->ended(in_.request)) ||
         (out_.request != nullptr && worker_->ended(out_.request)) || !endpoint_->lost().ok();
}

bool MessageCarrier::serve() {
  (void)worker_->look_at(taken_.request);
  if (owner_ == nullptr) return false;
  if (!broken_.why.ok()) {
    fail(broken_.why, broken_.damaged);
    return true;
  }
  more_ = false;
  const bool received = receive();
  bool sent = false;
  if (open_ && !in_send_) sent = finish_send();
  if (open_ && !in_send_) sent |= send();
  // Whatever UCX says, the peer may be gone: what the control plane hears of it counts first.
  if (open_ && !endpoint_->lost().ok()) {
    fail(Status(Code::kPeerLost, endpoint_->lost().text()), false);
    return true;
  }
  return received || sent;
}

// ---- Receiving

bool MessageCarrier::receive() {
  bool moved = false;
  while (open_) {
    if (in_.frame) {
      const ucs_status_t status = worker_->look_at(in_.request);
      if (status == UCS_INPROGRESS) break;
      moved = true;
      if (status != UCS_OK) {
        in_.frame.reset();
        in_.place = nullptr;
        if (endpoint_->usable())
          fail(endpoint_->lost_text(status), false);  // else serve tells, or drop is known
        break;
      }
      if (!finish_frame()) return true;
      continue;
    }
    const auto next = std::ranges::find_if(
        in_.waiting, [&](const Arrived& arrived) { return arrived.head.number == in_.frames; });
    if (next == in_.waiting.end()) break;
    const Arrived arrived = std::move(*next);
    in_.waiting.erase(next);
    ++in_.frames;
    moved = true;
    if (!begin(arrived)) return true;
  }
  return moved;
}

// False when the carrier is closed.
bool MessageCarrier::begin(const Arrived& arrived) {
  const auto header = wire::decode_header(arrived.head.frame);
  Status refused = header.status();
  if (refused.ok() && header->payload_bytes != arrived.bytes) {
    refused = error(Code::kProtocol, "{} came with {}", describe(*header),
                    counted(arrived.bytes, "byte"));
  }
  if (!refused.ok()) {
    release(arrived);
    fail(refused.with_prefix(fmt::format("from {}", peer_)), true);
    return false;
  }
  in_.frame = *header;
  in_.trailer = arrived.head.trailer;
  const Result<uint8_t*> place = owner_->on_header(*in_.frame);
  in_.place = place.ok() ? *place : nullptr;
  if (open_ && in_.place != nullptr && arrived.rendezvous) {
    in_.request = worker_->receive(arrived.data, in_.place, arrived.bytes);
  } else {
    if (open_ && in_.place != nullptr && arrived.bytes > 0)
      std::memcpy(in_.place, arrived.data, arrived.bytes);
    release(arrived);
  }
  return settle(place.status());
}

// False when the carrier is closed.
bool MessageCarrier::finish_frame() {
  const wire::FrameHeader frame = *in_.frame;
  const uint8_t* const payload = std::exchange(in_.place, nullptr);
  in_.frame.reset();
  if (payload != nullptr && frame.payload_bytes > 0) {
    const uint64_t sent = wire::decode_trailer(in_.trailer);
    const uint64_t found = hash64(payload, frame.payload_bytes);
    if (found != sent) {
      fail(error(Code::kProtocol, "{} from {} has checksum {:016x}, its bytes have {:016x}",
                 describe(frame), peer_, sent, found),
           true);
      return false;
    }
  }
  if (frame.kind == wire::FrameKind::kBye) {
    in_.bye = true;
    say_taken();
  }
  return settle(owner_->on_frame(frame));
}

void MessageCarrier::say_taken() {
  if (!open_ || !endpoint_->made()) return;
  taken_.head = {.to = peers_, .number = kTaken};
  taken_.request = endpoint_->send(taken_.head, nullptr, 0);
}

// Whether the carrier goes on after a call of the owner.
bool MessageCarrier::settle(const Status& status) {
  if (open_ && !status.ok()) fail(status, false);
  return open_ && broken_.why.ok();
}

// ---- Sending

void MessageCarrier::flush() {
  if (!open_ || owner_ == nullptr || in_send_) return;
  endpoint_->use();
  send();
}

// True: a frame has left.
bool MessageCarrier::finish_send() {
  if (out_.request == nullptr) return false;
  const ucs_status_t status = worker_->look_at(out_.request);
  if (status == UCS_INPROGRESS) return false;
  if (status != UCS_OK) {
    if (endpoint_->usable()) fail(endpoint_->lost_text(status), false);
    return true;
  }
  const framed::OutFrame sent = out_.frame;
  owner_->on_sent(sent);
  return true;
}

bool MessageCarrier::takes_turn() {
  wants_turn_ = !small_only_ && !endpoint_->turn_of(this);
  return !wants_turn_;
}

bool MessageCarrier::send() {
  uint64_t bytes = 0;
  in_send_ = true;
  while (open_ && endpoint_->connected() && out_.request == nullptr && takes_turn()) {
    if (bytes >= kTurnBytes) {
      more_ = true;
      break;
    }
    if (!owner_->next_frame(out_.frame)) break;
    const uint64_t payload = out_.frame.header.payload_bytes;
    out_.head.to = peers_;
    out_.head.number = out_.frames++;
    out_.head.frame = wire::encode_header(out_.frame.header);
    out_.head.trailer = {};
    if (payload > 0) out_.head.trailer = wire::encode_trailer(hash64(out_.frame.payload, payload));
    if (out_.frame.header.kind == wire::FrameKind::kBye) out_.bye = true;
    bytes += wire::frame_bytes(payload);
    out_.request = endpoint_->send(out_.head, out_.frame.payload, payload);
    if (out_.request == nullptr) {
      const framed::OutFrame sent = out_.frame;
      owner_->on_sent(sent);
    } else if (worker_->ended(out_.request)) {
      (void)finish_send();
    }
  }
  in_send_ = false;
  const bool waits =
      open_ && out_.request != nullptr && endpoint_->in_one_piece(out_.frame.header.payload_bytes);
  if (open_ && !waits) endpoint_->end_turn(this);
  return bytes > 0;
}

}  // namespace sotto::ucx
