#include "transports/framed/receives.h"
#include "core/base/text.h"

#include <cstring>

namespace sotto::framed {
namespace {

bool names(const Transfer& t, const wire::FrameHeader& h) {
  return t.round == h.round && t.segment == h.segment;
}

}  // namespace

void Receives::recv(Transfer& t) {
  Flow& f = peer_.flow(t.op->key);
  ++f.receives_open;
  // Nothing is delivered after a failure: a later operation would take messages of a peer that does
  // not agree with this rank.
  for (Unexpected** at = &f.unexpected; !peer_.failed() && *at != nullptr; at = &(*at)->next) {
    if ((*at)->round != t.round || (*at)->segment != t.segment) continue;
    Unexpected* message = *at;
    *at = message->next;
    deliver(f, t, *message);
    return;
  }
  f.receives.push(t);
}

// Gives a receive its message, which came before it.
void Receives::deliver(Flow& f, Transfer& t, Unexpected& message) {
  const uint64_t bytes = message.bytes;
  const bool fits = bytes == t.bytes;
  if (fits && bytes > 0) std::memcpy(t.data, message.data(), bytes);
  const uint64_t cost = message.cost;
  peer_.core().ops.free_unexpected(&message);
  flow_control_.return_credit(cost);
  if (!fits) {
    peer_.fail(error(Code::kProtocol, "{}, round {}, segment {}: {} sent {}, rank {} expects {}",
                     wire::describe(t.op->key), t.round, t.segment, peer_.name(),
                     counted(bytes, "byte"), peer_.core().rank, t.bytes));
    return;
  }
  complete(f, t);
}

void Receives::complete(Flow& f, Transfer& t) {
  --f.receives_open;
  peer_.core().sink.on_transfer(t, {});
}

Result<uint8_t*> Receives::begin(Arrival& arrival, const wire::FrameHeader& h) {
  SOTTO_ASSIGN(Flow* const f, peer_.flow_of_frame(h));
  if (f == nullptr) {
    return error(Code::kProtocol, "{} sent a {}, which is complete on rank {}", peer_.name(),
                 describe(h), peer_.core().rank);
  }
  SOTTO_TRY(flow_control_.take_credit(h));
  arrival.flow = f;
  return place(arrival, h);
}

Result<uint8_t*> Receives::place(Arrival& arrival, const wire::FrameHeader& h) {
  Flow& f = *arrival.flow;
  Transfer* const t = f.receives.take_first([&](const Transfer& r) { return names(r, h); });
  if (t != nullptr && t->bytes == h.payload_bytes) {
    arrival.transfer = t;
    return static_cast<uint8_t*>(t->data);
  }
  if (t != nullptr) {
    f.receives.push(*t);
    return error(Code::kProtocol, "{} sent a {}; rank {} expects {}", peer_.name(), describe(h),
                 peer_.core().rank, counted(t->bytes, "byte"));
  }
  if ((h.flags & wire::kFlagCredited) == 0) {
    return error(Code::kProtocol, "{} sent a {}, for which rank {} has no receive", peer_.name(),
                 describe(h), peer_.core().rank);
  }
  for (const Unexpected* u = f.unexpected; u != nullptr; u = u->next) {
    if (u->round == h.round && u->segment == h.segment)
      return error(Code::kProtocol, "{} sent a {} twice", peer_.name(), describe(h));
  }
  Unexpected* const message = peer_.core().ops.make_unexpected(h.payload_bytes);
  message->round = h.round;
  message->segment = h.segment;
  message->cost = wire::frame_bytes(h.payload_bytes);
  arrival.unexpected = message;
  return message->data();
}

void Receives::end(Arrival& arrival, const wire::FrameHeader& h) {
  const auto [f, t, message] = std::exchange(arrival, {});
  if (f == nullptr) return;  // cancelled while it arrived
  f->counters->message_received(h);
  if (t != nullptr) {
    if ((h.flags & wire::kFlagCredited) != 0)
      flow_control_.return_credit(wire::frame_bytes(h.payload_bytes));
    complete(*f, *t);
    return;
  }
  // The receive may have been posted while the message arrived.
  Transfer* const posted = f->receives.take_first([&](const Transfer& r) { return names(r, h); });
  if (posted != nullptr) {
    deliver(*f, *posted, *message);
  } else {
    message->next = std::exchange(f->unexpected, message);
  }
}

void Receives::drop(Arrival& arrival) {
  if (arrival.unexpected != nullptr) peer_.core().ops.free_unexpected(arrival.unexpected);
  arrival = {};
}

}  // namespace sotto::framed
