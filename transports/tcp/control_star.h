// The control connections of a rank: a star around the coordinator, over the connections of the
// rendezvous.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "transports/tcp/control_link.h"
#include "transports/tcp/control_peers.h"
#include "transports/tcp/reactor.h"
#include "transports/tcp/rendezvous_server.h"

namespace sotto::tcp {

class ControlStar final : public ControlPeers {
 public:
  // owner: of the messages that come, and of lost connections.
  ControlStar(Reactor& reactor, Membership group, ControlLinkOwner& owner);

  int32_t rank() const override { return group_.rank; }
  int32_t size() const override { return group_.size(); }
  int32_t coordinator() const override { return group_.coordinator; }
  uint64_t token() const { return group_.token; }
  const wire::Members::Member& member(int32_t rank) const override {
    return group_.members[static_cast<size_t>(rank)];
  }
  bool established() const override { return established_; }
  bool left(int32_t rank) const override { return left_[static_cast<size_t>(rank)]; }
  bool open(int32_t rank) const override;
  std::optional<int64_t> heard_ns(int32_t rank) const override;
  void send(int32_t rank, wire::FrameKind kind, const std::string& payload) override;
  bool send_sign(int32_t rank, const std::string& heartbeat) override;

  // The address at which this rank reaches the coordinator; empty on the coordinator.
  std::string coordinator_address() const;
  // Bytes on the control connection to a rank; null: there is no such connection.
  std::shared_ptr<const LinkBytes> link_bytes(int32_t rank) const;

  void establish() { established_ = true; }
  void on_bye(int32_t rank) { left_[static_cast<size_t>(rank)] = true; }
  // Says bye, and closes the connections when it was delivered or the deadline has passed.
  void leave(Deadline deadline);

 private:
  ControlLink* link(int32_t rank) const;

  Reactor& reactor_;
  Membership group_;
  bool established_ = false;
  std::vector<bool> left_;  // by rank
};

}  // namespace sotto::tcp
