// The control mesh of a group: a star around the coordinator, over the connections of the
// rendezvous. The coordinator decides the first cause and tells everyone; members report to it.
//
// A member that reports a failure waits for the decision, at most kDecisionMs, so that all ranks
// name one cause; then its own counts. Listeners are called from poll, never from inside fail.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/iface/rendezvous.h"
#include "transports/tcp/lobby.h"
#include "transports/tcp/reactor.h"

namespace sotto::tcp {

inline constexpr int64_t kDecisionMs = 200;

class TcpControl final : public ControlPlane, public ControlLinkOwner {
 public:
  TcpControl(std::shared_ptr<Reactor> reactor, Membership membership, int64_t heartbeat_ms);
  ~TcpControl() override;

  int32_t rank() const override { return group_.rank; }
  int32_t size() const override { return group_.size(); }
  uint64_t token() const override { return group_.token; }
  Result<std::vector<std::string>> all_gather(std::string_view what, std::string_view mine,
                                              Driver& driver, Deadline deadline) override;
  void fail(const FailureCause& cause) override;
  const std::optional<FailureCause>& failure() const override { return failure_; }
  void set_listener(ControlListener* listener) override { listener_ = listener; }
  int64_t silent_ms(int32_t rank) const override;
  void leave(Deadline deadline) override;

  // "rank 2 (pid 123 on host, 10.0.0.2:3456)"
  std::string describe_rank(int32_t rank) const;
  // The coordinator as this rank reaches it; empty on the coordinator.
  std::string coordinator_address() const;
  int32_t coordinator() const { return group_.coordinator; }
  // What has passed the control connection to a rank; null where there is none.
  std::shared_ptr<const LinkBytes> link_bytes(int32_t rank) const;

 private:
  struct Exchange {
    std::string what;
    int32_t what_rank = -1;  // who named it first
    std::vector<std::optional<std::string>> blobs;
    int32_t present = 0;
  };

  bool coordinates() const { return group_.rank == group_.coordinator; }
  ControlLink* link_of(int32_t rank) const;
  Status on_message(ControlLink& link, wire::FrameKind kind, wire::Bytes payload) override;
  void on_lost(ControlLink& link, const Status& why) override;
  Status on_gather(ControlLink& link, wire::Bytes payload);
  Status on_gathered(wire::Bytes payload);
  Status on_heartbeat(wire::Bytes payload);
  Status on_failure(wire::Bytes payload);
  void on_bye(ControlLink& link);
  void contribute(int32_t rank, uint64_t sequence, std::string what, std::string blob);
  void complete_exchange();
  std::string missing_text() const;
  Status failure_status() const;
  void decide(FailureCause cause);
  void adopt(FailureCause cause);
  void tick();
  void send_heartbeats();
  void send_note();

  std::shared_ptr<Reactor> reactor_owner_;
  Reactor& reactor_;
  Membership group_;
  int64_t heartbeat_ms_;
  std::shared_ptr<void> ticker_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  ControlListener* listener_ = nullptr;
  std::optional<FailureCause> failure_;
  std::optional<FailureCause> reported_;  // member: waits for the coordinator's decision
  int64_t reported_ns_ = 0;
  bool left_ = false;
  std::vector<bool> bye_;  // by rank

  uint64_t sequence_ = 0;  // of the next all-gather
  Exchange exchange_;      // coordinator: the one in progress
  std::optional<std::vector<std::string>> gathered_;
  std::string waiting_;  // member: whom the coordinator waits for
  std::string noted_;    // coordinator: what it has told about that
  int64_t last_heartbeat_ns_;
  std::vector<uint32_t> silent_ms_;  // member: as the coordinator reported
  int64_t silent_at_ns_ = 0;
};

}  // namespace sotto::tcp
