#include "core/iface/service.h"

#include <algorithm>

#include "core/base/text.h"

namespace sotto {

ServiceBox::ServiceBox(int32_t rank, int32_t size)
    : rank_(rank), sent_(static_cast<size_t>(size)), waiting_(static_cast<size_t>(size)) {}

Status ServiceBox::admit(const ServiceMessage& m) {
  const auto size = static_cast<int32_t>(sent_.size());
  if (m.destination == rank_)
    return invalid_argument("service message of rank {} to itself", rank_);
  if (m.destination < 0 || m.destination >= size)
    return invalid_argument("service message to rank {}; allowed: 0 to {}", m.destination,
                            size - 1);
  if (m.channel >= kServiceChannels)
    return invalid_argument("service message on channel {}; allowed: 0 to {}", m.channel,
                            kServiceChannels - 1);
  if (m.bytes.size() > kMaxServiceBytes)
    return invalid_argument("service message of {} bytes; at most {} are allowed", m.bytes.size(),
                            kMaxServiceBytes);
  uint32_t& sent = sent_[static_cast<size_t>(m.destination)];
  if (sent == kServiceWindow)
    return error(Code::kBusy,
                 "rank {} has not taken {} service messages of rank {}; more cannot wait",
                 m.destination, sent, rank_);
  ++sent;
  return ok_status();
}

Status ServiceBox::arrived(ServiceMessage m) {
  const auto source = static_cast<size_t>(m.source);
  if (m.source < 0 || source >= sent_.size() || m.source == rank_ || m.destination != rank_)
    return error(Code::kProtocol, "service message from rank {} to rank {} came to rank {} of {}",
                 m.source, m.destination, rank_, sent_.size());
  if (m.channel > kServiceDelivered || m.bytes.size() > kMaxServiceBytes ||
      (m.channel == kServiceDelivered && !m.bytes.empty()))
    return error(Code::kProtocol, "service message of rank {} on channel {} with {}", m.source,
                 m.channel, counted(m.bytes.size(), "byte"));
  const bool told = m.channel == kServiceDelivered;
  if (told ? sent_[source] == 0 : waiting_[source] == kServiceWindow)
    return error(Code::kProtocol, "rank {} {} more service messages than it may", m.source,
                 told ? "has taken" : "sends");
  if (told) {
    --sent_[source];
  } else {
    ++waiting_[source];
    arrived_.push_back(std::move(m));
  }
  return ok_status();
}

void ServiceBox::listen(uint32_t channel, ServiceListener* listener) {
  listeners_[channel] = listener;
}

std::optional<ServiceMessage> ServiceBox::next() {
  const auto found = std::ranges::find_if(
      arrived_, [this](const ServiceMessage& m) { return listeners_[m.channel] != nullptr; });
  if (found == arrived_.end()) return std::nullopt;
  ServiceMessage message = std::move(*found);
  arrived_.erase(found);
  --waiting_[static_cast<size_t>(message.source)];
  return message;
}

void ServiceBox::deliver(const ServiceMessage& m) const {
  listeners_[m.channel]->on_service(m.source, m.bytes);
}

ServiceMessage ServiceBox::delivered(const ServiceMessage& m) {
  return {m.destination, m.source, kServiceDelivered, {}};
}

}  // namespace sotto
