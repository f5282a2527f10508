// The rendezvous of a group. One rank, the coordinator, has a server to which the others connect as
// clients. When all ranks have joined, the server sends the list of members. The connections become
// the control plane.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/iface/rendezvous.h"
#include "core/wire/control.h"
#include "transports/tcp/control_link.h"
#include "transports/tcp/listener.h"
#include "transports/tcp/net.h"
#include "transports/tcp/rank_text.h"
#include "transports/tcp/reactor.h"

namespace sotto::tcp {

class RendezvousServer;

// What a rank has after the rendezvous.
struct Membership {
  int32_t rank = 0;
  int32_t coordinator = 0;
  uint64_t token = 0;
  std::vector<wire::Members::Member> members;  // in rank order
  // Coordinator: by rank, its own null. Other ranks: one, to the coordinator.
  std::vector<std::unique_ptr<ControlLink>> links;
  // Coordinator of a group with an id: answers clients that come too late.
  std::unique_ptr<RendezvousServer> server;
  int32_t size() const { return static_cast<int32_t>(members.size()); }
};

// Connections come from unknown peers. A join with the right token and size and a free rank is
// admitted; any other is refused, and fails its sender alone. A rank that is lost after its join
// has 2 s to join again; then the rendezvous fails. One that aborts leaves its place free.
class RendezvousServer final : public ControlLinkOwner {
 public:
  // token: of the id; 0: rendezvous at an address. Listens at once.
  static Result<std::unique_ptr<RendezvousServer>> open(Reactor& reactor, uint64_t token,
                                                        const Endpoint& at);
  ~RendezvousServer() override;
  uint16_t port() const { return listener_->port(); }

  // Waits for all ranks; a failure is sent to all clients. A server runs once. After that it
  // belongs to the membership if the group has an id; else it closes.
  static Result<Membership> run(std::unique_ptr<RendezvousServer> server, const wire::Join& own,
                                Driver& driver, Deadline deadline);

 private:
  struct Client {
    std::unique_ptr<ControlLink> link;
    wire::Join join;
    bool gone = false;  // to be destroyed outside of callbacks of its link
  };
  // The end of a client before the rendezvous was complete.
  struct Departure {
    int32_t rank = -1;
    int64_t at_ns = 0;
    bool aborted = false;
    FailureCause cause;
  };

  RendezvousServer(Reactor& reactor, uint64_t token);
  std::optional<Refusal> admit(std::unique_ptr<FrameStream>& stream, const wire::FrameHeader& first,
                               wire::Bytes payload);
  std::optional<Refusal> check(const wire::Join& join, const std::string& address);
  std::optional<Refusal> check_open(const wire::Join& join, const std::string& who) const;
  Refusal refuse_late(const wire::Join& join, const std::string& who) const;
  Status on_message(ControlLink& link, wire::FrameKind kind, wire::Bytes payload) override;
  void on_lost(ControlLink& link, const Status& why) override;

  Client* find(const ControlLink& link);
  Client*& place_of(int32_t rank) { return by_rank_[static_cast<size_t>(rank)]; }
  bool in_range(int32_t rank) const { return own_ && rank >= 0 && rank < own_->size; }
  void check_early();
  void depart(Client& client, bool aborted, FailureCause cause);
  const Departure* departed(int32_t rank) const;
  // A rank that was lost and has not joined again; due: its 2 s for that are over.
  const Departure* lost(bool due) const;
  void tick();
  void fail(FailureCause cause);
  FailureCause too_late() const;
  void report_missing();
  bool all_there() const;
  std::string waiting_text() const;
  Membership finish();
  void drain(Driver& driver);

  Reactor& reactor_;
  uint64_t token_;
  std::unique_ptr<FrameListener> listener_;
  std::shared_ptr<void> ticker_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::vector<Departure> departures_;  // at most one of each rank
  std::optional<wire::Join> own_;
  std::vector<Client*> by_rank_;  // null: missing
  std::optional<FailureCause> failure_;
  std::vector<bool> told_;  // by rank: the failure was sent
  bool complete_ = false;
  std::vector<wire::Members::Member> members_;  // once complete
  std::string reported_missing_;                // the last report to the clients
};

// The client's side: connects to the coordinator at one of the endpoints and joins. at_address: the
// coordinator may start later, so connecting is tried until the deadline.
Result<Membership> join_rendezvous(Reactor& reactor, std::vector<Endpoint> endpoints,
                                   bool at_address, const wire::Join& own, Driver& driver,
                                   Deadline deadline);

// Time that a failing rank has to deliver its cause.
inline constexpr int64_t kLastWordsUs = 200'000;

}  // namespace sotto::tcp
