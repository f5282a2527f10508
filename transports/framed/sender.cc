#include "transports/framed/sender.h"

#include <algorithm>

namespace sotto::framed {
namespace {

void fill(OutFrame& out, Transfer& t) {
  out.header.kind = wire::FrameKind::kData;
  out.header.message_class = t.message_class;
  out.header.flags = static_cast<uint32_t>(t.scratch[kFlagsSlot]);
  out.header.key = t.op->key;
  out.header.signature = t.op->signature;
  out.header.round = t.round;
  out.header.segment = t.segment;
  out.header.payload_bytes = t.bytes;
  out.payload = static_cast<const uint8_t*>(t.data);
  out.message = &t;
}

}  // namespace

void FrameRing::push(const wire::FrameHeader& frame) {
  if (count_ == frames_.size()) {
    std::rotate(frames_.begin(), frames_.begin() + static_cast<ptrdiff_t>(first_), frames_.end());
    first_ = 0;
    frames_.resize(std::max<size_t>(16, 2 * frames_.size()));
  }
  frames_[(first_ + count_++) % frames_.size()] = frame;
}

void FrameRing::pop() {
  first_ = (first_ + 1) % frames_.size();
  --count_;
}

Sender::Sender(std::vector<std::unique_ptr<FrameCarrier>> carriers, uint32_t background_share)
    : queue_(background_share) {
  for (auto& carrier : carriers) routes_.push_back({std::move(carrier)});
}

void Sender::flush() {
  for (const Route& route : routes_) route.carrier->flush();
}

void Sender::close() {
  for (const Route& route : routes_) route.carrier->close();
}

bool Sender::any_open() const {
  return std::ranges::any_of(routes_, [](const Route& route) { return route.carrier->open(); });
}

bool Sender::can_send() const {
  return std::ranges::any_of(routes_, [](const Route& route) { return route.carrier->can_send(); });
}

bool Sender::delivered() const {
  // A carrier with half a message of a cancelled operation cannot send.
  if (!can_send()) return true;
  return queue_.empty() && service_.empty() && (failures_.empty() || failure_sending()) &&
         std::ranges::all_of(routes_, [](const Route& route) {
           return !route.carrier->can_send() || (!route.bye_due && route.carrier->delivered());
         });
}

void Sender::send_control(const wire::FrameHeader& frame) {
  service_.push(frame);
  flush();
}

void Sender::send_failure(std::string payload) {
  if (bye_sent_) return;
  failures_.push_back(std::move(payload));
  flush();
}

void Sender::send_bye() {
  if (std::exchange(bye_sent_, true)) return;
  for (Route& route : routes_) {
    if (!route.carrier->can_send()) continue;  // perhaps never used
    route.bye_due = true;
    route.carrier->flush();
  }
}

bool Sender::next(size_t number, OutFrame& out) {
  out = OutFrame{};
  if (!failures_.empty() && !failure_sending()) {
    failure_on_ = number;
    out.header.kind = wire::FrameKind::kFailure;
    out.header.payload_bytes = failures_.front().size();
    out.payload = reinterpret_cast<const uint8_t*>(failures_.front().data());
    return true;
  }
  if (!service_.empty()) {
    out.header = service_.front();
    service_.pop();
    return true;
  }
  Transfer* t = small_only(number) ? queue_.pop_small() : queue_.pop();
  if (t != nullptr) {
    fill(out, *t);
    return true;
  }
  out.header.kind = wire::FrameKind::kBye;
  return std::exchange(routes_[number].bye_due, false);
}

void Sender::sent(const OutFrame& out) {
  if (out.header.kind != wire::FrameKind::kFailure) return;
  failures_.pop_front();
  failure_on_.reset();
}

void Sender::cancel(const OpDescriptor& op) {
  queue_.remove(op);
  for (const Route& route : routes_) {
    const Transfer* sending = route.carrier->sending();
    if (sending != nullptr && sending->op == &op) route.carrier->drop_out();
  }
}

}  // namespace sotto::framed
