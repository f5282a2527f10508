// A transport without a rendezvous of its own, beside the backend whose rendezvous and control
// plane its comms have, as an engine drives the two.
#pragma once

#include <algorithm>
#include <memory>

#include "core/iface/rendezvous.h"

namespace sotto::test {

class JoinedBackend final : public Backend, private Poller {
 public:
  JoinedBackend(std::unique_ptr<Backend> rendezvous, std::unique_ptr<Backend> transport)
      : rendezvous_(std::move(rendezvous)), transport_(std::move(transport)) {
    Poller& messages = transport_->poller();
    if (messages.descriptor() < 0) {
      messages.forward_wakes(&rendezvous_->poller());
    } else {
      rendezvous_->poller().watch(messages.descriptor(), true);
    }
  }
  ~JoinedBackend() override {
    Poller& messages = transport_->poller();
    if (messages.descriptor() < 0) {
      messages.forward_wakes(nullptr);
    } else {
      rendezvous_->poller().watch(messages.descriptor(), false);
    }
  }

  const char* name() const override { return transport_->name(); }
  Poller& poller() override { return *this; }
  Result<UniqueId> make_unique_id(Reach reach) override {
    return rendezvous_->make_unique_id(reach);
  }
  bool knows(const UniqueId& id) const override { return rendezvous_->knows(id); }
  Result<std::unique_ptr<ControlPlane>> join(const JoinRequest& request, Driver& driver) override {
    return rendezvous_->join(request, driver);
  }
  uint64_t place() const override { return transport_->place(); }
  Result<std::unique_ptr<Transport>> connect(ControlPlane& control, const LinkPeers& peers,
                                             TransferSink& sink, Driver& driver,
                                             Deadline deadline) override {
    return transport_->connect(control, peers, sink, driver, deadline);
  }

 private:
  bool poll(int64_t wait_us) override {
    Poller& messages = transport_->poller();
    bool ran = messages.poll(0);
    if (!ran && wait_us > 0 && !messages.arm()) wait_us = 0;
    ran |= rendezvous_->poller().poll(ran ? 0 : std::min(wait_us, messages.poll_interval_us()));
    return messages.poll(0) || ran;
  }
  void wake() override { rendezvous_->poller().wake(); }

  const std::unique_ptr<Backend> rendezvous_;
  const std::unique_ptr<Backend> transport_;
};

}  // namespace sotto::test
