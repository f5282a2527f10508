// Service messages over the control connections: a star. Members send theirs to the coordinator,
// which passes on what is for another member.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/iface/service.h"
#include "core/wire/control.h"
#include "transports/tcp/reactor.h"

namespace sotto::tcp {

class ServiceRelay {
 public:
  // Sends a service frame on the control connection to a rank; where there is none any more, the
  // message is lost, as the rank is.
  using Post = std::function<void(int32_t rank, std::string payload)>;

  ServiceRelay(Reactor& reactor, int32_t rank, int32_t size, int32_t coordinator, Post post);

  Status send(ServiceMessage message);
  void listen(uint32_t channel, ServiceListener* listener);
  // A frame from the control connection of a rank.
  Status on_frame(int32_t from, wire::Bytes payload);
  // Nothing is delivered or passed on any more.
  void stop() { box_.reset(); }

 private:
  void dispatch(ServiceMessage message);
  Status pass_on(int32_t from, const wire::Service& frame);
  void deliver_soon();

  Reactor& reactor_;
  const int32_t rank_;
  const int32_t size_;
  const int32_t coordinator_;
  const Post post_;
  std::shared_ptr<ServiceBox> box_;  // null: stopped
};

}  // namespace sotto::tcp
