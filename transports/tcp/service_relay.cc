#include "transports/tcp/service_relay.h"

#include <utility>

namespace sotto::tcp {

ServiceRelay::ServiceRelay(Reactor& reactor, int32_t rank, int32_t size, int32_t coordinator,
                           Post post)
    : reactor_(reactor),
      rank_(rank),
      size_(size),
      coordinator_(coordinator),
      post_(std::move(post)),
      box_(std::make_shared<ServiceBox>(rank, size)) {}

Status ServiceRelay::send(ServiceMessage message) {
  if (box_ == nullptr) return invalid_state("rank {} sends no service messages any more", rank_);
  SOTTO_TRY(box_->admit(message));
  dispatch(std::move(message));
  return ok_status();
}

void ServiceRelay::listen(uint32_t channel, ServiceListener* listener) {
  if (box_ == nullptr) return;
  box_->listen(channel, listener);
  deliver_soon();
}

Status ServiceRelay::on_frame(int32_t from, wire::Bytes payload) {
  if (box_ == nullptr) return ok_status();
  auto frame = wire::Service::decode(payload);
  if (!frame.ok()) return frame.status();
  if (rank_ == coordinator_ && frame->message.source != from)
    return error(Code::kProtocol, "rank {} sends a service message of rank {}", from,
                 frame->message.source);
  if (rank_ == coordinator_ && frame->message.destination != rank_) return pass_on(from, *frame);
  SOTTO_TRY(box_->arrived(std::move(frame->message)));
  deliver_soon();
  return ok_status();
}

// The destination would take the coordinator for the culprit of a wrong message.
Status ServiceRelay::pass_on(int32_t from, const wire::Service& frame) {
  const ServiceMessage& m = frame.message;
  if (m.destination < 0 || m.destination >= size_ || m.channel > kServiceDelivered)
    return error(Code::kProtocol, "rank {} sends a service message to rank {} of {} on channel {}",
                 from, m.destination, size_, m.channel);
  post_(m.destination, frame.encode());
  return ok_status();
}

void ServiceRelay::dispatch(ServiceMessage message) {
  const int32_t next = rank_ == coordinator_ ? message.destination : coordinator_;
  post_(next, wire::Service{std::move(message)}.encode());
}

// From poll, never from inside a call. A listener may end everything.
void ServiceRelay::deliver_soon() {
  asio::post(reactor_.io(), [this, alive = std::weak_ptr(box_)] {
    while (const std::shared_ptr<ServiceBox> box = alive.lock()) {
      const std::optional<ServiceMessage> message = box->next();
      if (!message) return;
      dispatch(ServiceBox::delivered(*message));
      box->deliver(*message);
    }
  });
}

}  // namespace sotto::tcp
