// How the ranks of a group meet: one of them, the coordinator, keeps a server where the others
// present themselves; when everybody is there it tells everyone who the members are. The
// connections become the control plane.
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
#include "transports/tcp/reactor.h"

namespace sotto::tcp {

class RendezvousServer;

// What a rank has when it has met the others.
struct Membership {
  int32_t rank = 0;
  int32_t coordinator = 0;
  uint64_t token = 0;
  std::vector<wire::Members::Member> members;  // in rank order
  // Coordinator: by rank, its own is null. Others: one, to the coordinator.
  std::vector<std::unique_ptr<ControlLink>> links;
  // Coordinator of a group with an id: stays, to tell those who come too late.
  std::unique_ptr<RendezvousServer> server;
  int32_t size() const { return static_cast<int32_t>(members.size()); }
};

// This process, for reports.
std::string host_name();
// "rank 2 (pid 123 on host, 10.0.0.2:3456)".
std::string member_text(int32_t rank, const wire::Members::Member& member);
// "2, 5 to 7".
std::string rank_list(const std::vector<int32_t>& ranks);
// Of what a coordinator waits for, "rank 2 (turned away: ...)": "rank 2 did not come (turned ...)".
std::string did_not_come(const std::string& waiting);

// Who connects may be anybody: a connection is admitted by a join of the right token, size and rank
// whose place is free; any other is refused, and only the one who came with it fails. A rank that
// is admitted and lost has kReturnUs to come again before that is everybody's failure; one that
// gives up leaves its place to whoever comes next.
class RendezvousServer final : public ControlLinkOwner {
 public:
  // token: of the id; 0 when ranks meet at an address. Listens at once.
  static Result<std::unique_ptr<RendezvousServer>> open(Reactor& reactor, uint64_t token,
                                                        const Endpoint& at);
  ~RendezvousServer() override;
  uint16_t port() const { return listener_->port(); }

  // Waits for all ranks. On failure everybody who is there is told the cause. A server is used
  // once; with an id it then belongs to the membership, otherwise it closes.
  static Result<Membership> run(std::unique_ptr<RendezvousServer> server, const wire::Join& own,
                                Driver& driver, Deadline deadline);

 private:
  struct Client {
    std::unique_ptr<ControlLink> link;
    wire::Join join;
    bool gone = false;  // goes when nobody is inside its link
  };
  // Of a client that went before all were there.
  struct Departure {
    int32_t rank = -1;
    int64_t at_ns = 0;
    bool gave_up = false;
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
  void depart(Client& client, bool gave_up, FailureCause cause);
  const Departure* departed(int32_t rank) const;
  // Who was lost and has not come again; due: and had the time to.
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
  std::vector<bool> told_;  // by rank: who knows of the failure
  bool complete_ = false;
  std::vector<wire::Members::Member> members_;  // once complete
  std::string reported_missing_;  // what the clients were last told about who is missing
};

// The other ranks' side: finds the coordinator at one of the endpoints and presents itself.
// at_address: the coordinator may not be there yet, so connecting is tried until the deadline.
Result<Membership> join_rendezvous(Reactor& reactor, std::vector<Endpoint> endpoints,
                                   bool at_address, const wire::Join& own, Driver& driver,
                                   Deadline deadline);

// How long a failing rank waits for its last words to arrive.
inline constexpr int64_t kLastWordsUs = 200'000;

}  // namespace sotto::tcp
