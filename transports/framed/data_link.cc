#include "transports/framed/data_link.h"

#include <algorithm>
#include <utility>

namespace sotto::framed {
namespace {

// Time that the control plane has to name the failure that a lost connection is often an echo of.
constexpr int64_t kGraceNs = 200'000'000;
// Largest payload of a failure frame: two texts and some numbers.
constexpr uint64_t kMaxFailureBytes = 2 * wire::kMaxTextBytes + 64;

}  // namespace

DataLink::DataLink(TransportCore& core, int32_t peer, PeerCarriers carriers)
    : peer_(core, peer, std::move(carriers.name)),
      sender_(std::move(carriers.carriers), core.limits.background_share),
      service_counters_(core.counters.at(0, peer)) {
  for (size_t i = 0; i < sender_.carriers(); ++i)
    connections_.push_back(std::make_unique<Connection>(*this, i));
  for (size_t i = 0; i < sender_.carriers(); ++i)
    sender_.carrier(i).start(*connections_[i], peer_.name(), sender_.small_only(i));
}

void DataLink::send(Transfer& t) {
  flow_control_.send(t);
  use();
  fail_if_needed();
}

void DataLink::recv(Transfer& t) {
  receives_.recv(t);
  use();
  fail_if_needed();
}

// The first message makes carriers connect that do so when they are used, also where it is only
// expected, or waits for the peer: then there is no frame yet.
void DataLink::use() {
  if (!std::exchange(used_, true)) sender_.flush();
}

void DataLink::cancel(OpState& op) {
  for (Flow* f = op.flows; f != nullptr; f = f->next_of_op) {
    if (f->peer != peer_.rank()) continue;
    flow_control_.cancel(*f);
    for (const auto& connection : connections_) {
      if (connection->arrival.flow == f) connection->drop_arrival();
    }
  }
  if (op.descriptor != nullptr) sender_.cancel(*op.descriptor);
}

void DataLink::complete(const OpState& op) {
  const auto arriving = std::ranges::find_if(connections_, [&](const auto& connection) {
    const Flow* flow = connection->arrival.flow;
    return flow != nullptr && flow->op == &op;
  });
  if (arriving == connections_.end()) return;
  (*arriving)->drop_arrival();
  peer_.fail(error(Code::kProtocol, "{} sends a message of {}, {}, that rank {} did not expect",
                   peer_.name(), wire::describe(op.key), describe(op.descriptor->signature),
                   peer_.core().rank));
}

void DataLink::tick(int64_t now_ns) {
  if (lost_ && now_ns - lost_ns_ >= kGraceNs) peer_.fail(*lost_);
  flow_control_.tick(now_ns);
}

// ---- frames

Result<uint8_t*> DataLink::Connection::on_header(const wire::FrameHeader& h) {
  if (h.kind == wire::FrameKind::kData) return link_.receives_.begin(arrival, h);
  const bool failure = h.kind == wire::FrameKind::kFailure;
  if (failure && link_.peer_.core().failures != nullptr && h.payload_bytes <= kMaxFailureBytes) {
    failure_.resize(h.payload_bytes);
    return reinterpret_cast<uint8_t*>(failure_.data());
  }
  if (h.kind > wire::FrameKind::kAnnounce && h.kind != wire::FrameKind::kBye) {
    return error(Code::kProtocol, "{} on the data connection from {}", describe(h),
                 link_.peer_.name());
  }
  return nullptr;
}

Status DataLink::Connection::on_frame(const wire::FrameHeader& h) {
  if (h.kind == wire::FrameKind::kData) {
    link_.receives_.end(arrival, h);
    return {};
  }
  link_.service_counters_.service_received(wire::frame_bytes(h.payload_bytes));
  if (h.kind == wire::FrameKind::kFailure) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(failure_.data());
    return link_.peer_.core().failures->on_failure_frame(link_.peer_.rank(),
                                                         wire::Bytes(bytes, failure_.size()));
  }
  if (h.kind == wire::FrameKind::kBye) bye_received = true;
  return link_.on_service(h);
}

Status DataLink::on_service(const wire::FrameHeader& h) {
  switch (h.kind) {
    case wire::FrameKind::kReady: return flow_control_.on_ready(h);
    case wire::FrameKind::kCredit: return flow_control_.on_credit(h);
    case wire::FrameKind::kAnnounce: return flow_control_.on_announce(h);
    default: return {};
  }
}

void DataLink::Connection::on_sent(const OutFrame& out) {
  if (out.message == nullptr) {
    link_.service_counters_.service_sent(wire::frame_bytes(out.header.payload_bytes));
    link_.sender_.sent(out);
    return;
  }
  TransportCore& core = link_.peer_.core();
  if (const Flow* f = core.ops.find(out.header.key, link_.peer_.rank()))
    f->counters->message_sent(out.header);
  core.sink.on_transfer(*out.message, {});
}

void DataLink::Connection::drop_arrival() {
  link_.sender_.carrier(number_).drop_in();
  link_.receives_.drop(arrival);
}

// ---- the end of a carrier

void DataLink::Connection::on_broken(Status why, bool damaged) {
  link_.lost(*this, std::move(why), damaged);
}

void DataLink::lost(const Connection& connection, Status why, bool damaged) {
  FailureListener* const failures = peer_.core().failures;
  if (!connected() && failures != nullptr) failures->on_disconnected(peer_.rank());
  if (!sender_.failure_sent()) sender_.flush();  // it may have been under way there
  if (sender_.bye_sent() || peer_.failed()) return;
  if (why.code() != Code::kPeerLost) {
    peer_.fail(damaged ? connection_status(why.code(), "is damaged", why) : std::move(why));
    return;
  }
  if (connection.bye_received) {
    fail_if_needed();
    return;
  }
  lost_ = connection_status(why.code(), "is lost", why);
  lost_ns_ = peer_.core().clock.now_ns();
}

// The text names both ends, since each of them sees another error.
Status DataLink::connection_status(Code code, std::string_view what, const Status& why) const {
  return error(code, "the connection between {} and {} {}: rank {}: {}", peer_.core().name,
               peer_.name(), what, peer_.core().rank, why.text());
}

// After an orderly end of the peer: fails if an operation here still needs it.
void DataLink::fail_if_needed() {
  if (!connections_[0]->bye_received || connected() || peer_.failed()) return;
  for (Flow* f = peer_.flows(); f != nullptr; f = f->next_of_peer) {
    if (f->receives_open == 0 && f->waiting.empty() && !sender_.has_messages()) continue;
    peer_.fail(error(Code::kPeerLost, "{} has left the group; rank {} still needs it in {}",
                     peer_.name(), peer_.core().rank, wire::describe(f->op->key)));
    return;
  }
}

}  // namespace sotto::framed
