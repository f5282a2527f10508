// How the ranks of a group meet: one of them, the coordinator, keeps a lobby where the others
// present themselves; when everybody is there it tells everyone who the members are. The
// connections become the control mesh.
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
#include "transports/tcp/net.h"
#include "transports/tcp/reactor.h"

namespace sotto::tcp {

class Lobby;

// What a rank has when it has met the others.
struct Membership {
  int32_t rank = 0;
  int32_t coordinator = 0;
  uint64_t token = 0;
  std::vector<wire::Members::Member> members;  // in rank order
  // Coordinator: by rank, its own is null. Others: one, to the coordinator.
  std::vector<std::unique_ptr<ControlLink>> links;
  // Coordinator of a group with an id: stays, to tell those who come too late.
  std::unique_ptr<Lobby> lobby;
  int32_t size() const { return static_cast<int32_t>(members.size()); }
};

// This process, for reports.
std::string host_name();
// "rank 2 (pid 123 on host, 10.0.0.2:3456)".
std::string member_text(int32_t rank, const wire::Members::Member& member);
// "2, 5 to 7".
std::string rank_list(const std::vector<int32_t>& ranks);

class Lobby final : public ControlLinkOwner {
 public:
  // token: of the id; 0 when ranks meet at an address. Listens at once.
  static Result<std::unique_ptr<Lobby>> open(Reactor& reactor, uint64_t token, const Endpoint& at);
  ~Lobby() override;
  uint16_t port() const { return listener_->port(); }

  // Waits for all ranks. On failure everybody who is there is told the cause. A lobby is used once;
  // with an id it then belongs to the membership, otherwise it closes.
  static Result<Membership> meet(std::unique_ptr<Lobby> lobby, const wire::Join& own,
                                 Driver& driver, Deadline deadline);

 private:
  struct Guest {
    std::unique_ptr<ControlLink> link;
    std::optional<wire::Join> join;
    bool rejected = false;
  };

  Lobby(Reactor& reactor, uint64_t token);
  void accepted(int fd, std::string name);
  Status on_message(ControlLink& link, wire::FrameKind kind, wire::Bytes payload) override;
  void on_lost(ControlLink& link, const Status& why) override;

  Guest* find(const ControlLink& link);
  void reject(Guest& guest, const FailureCause& cause);
  void check_all();
  void check(Guest& guest);
  void fail(FailureCause cause);
  void send_note();
  std::vector<int32_t> missing() const;
  std::string missing_text() const;
  Membership finish();
  void drain(Driver& driver);

  Reactor& reactor_;
  uint64_t token_;
  std::unique_ptr<Listener> listener_;
  std::shared_ptr<void> ticker_;
  std::vector<std::unique_ptr<Guest>> guests_;
  std::optional<wire::Join> own_;
  std::vector<Guest*> by_rank_;  // null: missing
  std::optional<FailureCause> failure_;
  size_t told_ = 0;  // guests who know of the failure, or were its cause
  bool complete_ = false;
  std::vector<wire::Members::Member> members_;  // once complete
  std::string noted_;        // what the guests were last told about who is missing
  std::string turned_away_;  // the last one who came with another token or version
};

// The other ranks' side: finds the coordinator at one of the endpoints and presents itself.
// at_address: the coordinator may not be there yet, so connecting is tried until the deadline.
Result<Membership> join_lobby(Reactor& reactor, std::vector<Endpoint> endpoints, bool at_address,
                              const wire::Join& own, Driver& driver, Deadline deadline);

// How long a failing rank waits for its last words to arrive.
inline constexpr int64_t kLastWordsUs = 200'000;

}  // namespace sotto::tcp
