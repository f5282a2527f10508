#include "transports/framed/flow_control.h"
#include "core/base/text.h"

#include <algorithm>

namespace sotto::framed {
namespace {

// Wait for a READY after which a message is announced.
constexpr int64_t kAnnounceNs = 100'000'000;
// Time after which open receives of small messages get a READY, like those of large ones.
constexpr int64_t kRemindNs = 500'000'000;

}  // namespace

void FlowControl::send(Transfer& t) {
  Flow& f = peer_.flow(t.op->key);
  if (admit(f, t)) {
    sender_.queue(t);
    sender_.flush();
    return;
  }
  if (f.waiting.empty()) {
    f.waiting_since_ns = peer_.core().clock.now_ns();
    ++waiting_flows_;
  }
  f.waiting.push(t);
}

// Whether a message may be sent: after a READY, or on credit, which it then takes.
bool FlowControl::admit(const Flow& f, Transfer& t) {
  t.scratch[kFlagsSlot] = 0;
  if (f.peer_ready && t.round <= *f.peer_ready) return true;
  const uint64_t cost = wire::frame_bytes(t.bytes);
  if (t.bytes > limits().eager_bytes || cost > credit_) return false;
  credit_ -= cost;
  t.scratch[kFlagsSlot] = wire::kFlagCredited;
  return true;
}

void FlowControl::release(Flow& f) {
  if (f.waiting.empty()) return;
  while (Transfer* t = f.waiting.take_first([&](Transfer& w) { return admit(f, w); }))
    sender_.queue(*t);
  if (f.waiting.empty()) --waiting_flows_;
}

void FlowControl::release_all() {
  if (waiting_flows_ == 0) return;
  // By priority, then by time of waiting.
  for (Flow* f = peer_.flows(); f != nullptr; f = f->next_of_peer) {
    if (!f->waiting.empty()) release_order_.push_back(f);
  }
  const auto urgency = [](const Flow* f) { return f->waiting.head->op->priority; };
  std::stable_sort(release_order_.begin(), release_order_.end(),
                   [&](const Flow* a, const Flow* b) { return urgency(a) > urgency(b); });
  for (Flow* f : release_order_) release(*f);
  release_order_.clear();
}

void FlowControl::cancel(const Flow& f) {
  if (!f.waiting.empty()) --waiting_flows_;
}

void FlowControl::ready(const OpDescriptor& op, uint32_t last_round, uint64_t largest) {
  Flow& f = peer_.flow(op.key);
  f.own_ready.round = std::max(f.own_ready.round.value_or(0), last_round);
  f.own_ready.changed_ns = peer_.core().clock.now_ns();
  if (largest > limits().eager_bytes || sender_may_be_dry()) send_ready(f);
}

void FlowControl::send_ready(Flow& f) {
  OwnReady& own = f.own_ready;
  if (f.receives_open == 0 || !own.round || (own.sent && *own.sent >= *own.round)) return;
  own.sent = own.round;
  wire::FrameHeader frame;
  frame.kind = wire::FrameKind::kReady;
  frame.key = f.op->key;
  frame.signature = f.op->descriptor->signature;
  frame.round = *own.round;
  sender_.send_control(frame);
}

Status FlowControl::on_ready(const wire::FrameHeader& h) {
  SOTTO_ASSIGN(Flow* const f, peer_.flow_of_frame(h));
  if (f == nullptr) return {};  // all was sent on credit before
  f->peer_ready = std::max(f->peer_ready.value_or(0), h.round);
  release(*f);
  sender_.flush();
  return {};
}

Status FlowControl::on_credit(const wire::FrameHeader& h) {
  const uint64_t in_use = limits().credit_bytes - credit_;
  if (h.key.number > in_use) {
    return error(Code::kProtocol, "{} gives back {} of credit; {} of {} are in use", peer_.name(),
                 counted(h.key.number, "byte"), in_use, limits().credit_bytes);
  }
  credit_ += h.key.number;
  release_all();
  sender_.flush();
  return {};
}

Status FlowControl::on_announce(const wire::FrameHeader& h) {
  SOTTO_ASSIGN(Flow* const f, peer_.flow_of_frame(h));
  if (f == nullptr) {
    return error(Code::kProtocol,
                 "{} waits to send a message of {}, {}, which is complete on rank {}", peer_.name(),
                 wire::describe(h.key), describe(h.signature), peer_.core().rank);
  }
  if (f->op->descriptor != nullptr) send_ready(*f);
  return {};
}

Status FlowControl::take_credit(const wire::FrameHeader& h) {
  if ((h.flags & wire::kFlagCredited) == 0) return {};
  const uint64_t cost = wire::frame_bytes(h.payload_bytes);
  if (h.payload_bytes > limits().eager_bytes || cost > limits().credit_bytes - credit_out_) {
    return error(Code::kProtocol,
                 "{} exceeds its credit: {} of {} bytes are in use and it sent a {}", peer_.name(),
                 credit_out_, limits().credit_bytes, describe(h));
  }
  const bool was_dry = sender_may_be_dry();
  credit_out_ += cost;
  if (was_dry || !sender_may_be_dry()) return {};
  for (Flow* f = peer_.flows(); f != nullptr; f = f->next_of_peer) send_ready(*f);
  return {};
}

void FlowControl::return_credit(uint64_t cost) {
  credit_consumed_ += cost;
  if (credit_consumed_ < limits().credit_bytes / 4) return;
  wire::FrameHeader frame;
  frame.kind = wire::FrameKind::kCredit;
  frame.key.number = credit_consumed_;
  credit_out_ -= credit_consumed_;
  credit_consumed_ = 0;
  sender_.send_control(frame);
}

void FlowControl::tick(int64_t now_ns) {
  for (Flow* f = peer_.flows(); f != nullptr; f = f->next_of_peer) {
    // The peer may be in an operation without messages to this rank: READY shows it the signature.
    if (now_ns - f->own_ready.changed_ns >= kRemindNs) send_ready(*f);
    if (f->waiting.empty() || f->announced || now_ns - f->waiting_since_ns < kAnnounceNs) continue;
    f->announced = true;
    const Transfer& first = *f->waiting.head;
    wire::FrameHeader frame;
    frame.kind = wire::FrameKind::kAnnounce;
    frame.key = f->op->key;
    frame.signature = first.op->signature;
    frame.round = first.round;
    frame.segment = first.segment;
    sender_.send_control(frame);
  }
}

}  // namespace sotto::framed
