#include "transports/tcp/control_star.h"

#include <algorithm>
#include <utility>

namespace sotto::tcp {

ControlStar::ControlStar(Reactor& reactor, Membership group, ControlLinkOwner& owner)
    : reactor_(reactor), group_(std::move(group)), left_(static_cast<size_t>(group_.size())) {
  const auto ranks = static_cast<uint64_t>(size());
  for (const auto& link : group_.links) {
    if (!link) continue;
    link->set_owner(owner);
    // Members send one blob, the coordinator all of them.
    link->set_max_payload((coordinates() ? 1 : ranks) * (wire::kMaxBlobBytes + 64) +
                          4 * wire::kMaxTextBytes);
  }
}

ControlLink* ControlStar::link(int32_t rank) const {
  if (coordinates()) return group_.links[static_cast<size_t>(rank)].get();
  return rank == group_.coordinator && !group_.links.empty() ? group_.links[0].get() : nullptr;
}

bool ControlStar::open(int32_t rank) const {
  const ControlLink* one = link(rank);
  return one != nullptr && one->open();
}

std::optional<int64_t> ControlStar::heard_ns(int32_t rank) const {
  const ControlLink* one = link(rank);
  if (one == nullptr) return {};
  return one->last_heard_ns();
}

void ControlStar::send(int32_t rank, wire::FrameKind kind, const std::string& payload) {
  if (ControlLink* one = link(rank)) one->send(kind, payload);
}

bool ControlStar::send_sign(int32_t rank, const std::string& heartbeat) {
  ControlLink* one = link(rank);
  if (one == nullptr || !one->flushed()) return false;
  one->send(wire::FrameKind::kHeartbeat, heartbeat);
  return true;
}

std::string ControlStar::coordinator_address() const {
  return coordinates() ? "" : group_.links[0]->name();
}

std::shared_ptr<const LinkBytes> ControlStar::link_bytes(int32_t rank) const {
  const ControlLink* one = link(rank);
  return one != nullptr ? one->bytes() : nullptr;
}

void ControlStar::leave(Deadline deadline) {
  left_[static_cast<size_t>(rank())] = true;
  for (const auto& one : group_.links) {
    if (one) one->send(wire::FrameKind::kBye, "");
  }
  const auto told = [this] {
    return std::all_of(group_.links.begin(), group_.links.end(),
                       [](const auto& one) { return !one || one->delivered(); });
  };
  while (!told() && !deadline.passed(reactor_.clock()))
    reactor_.poll(std::min<int64_t>(1000, deadline.left_us(reactor_.clock())));
  for (const auto& one : group_.links) {
    if (one) one->close();
  }
  group_.server.reset();
}

}  // namespace sotto::tcp
