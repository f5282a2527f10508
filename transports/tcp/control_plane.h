// The control plane of a group: a star around the coordinator, over the connections of the
// rendezvous.
//
// Failure. The coordinator decides the first cause and tells everyone; members propose. A decision
// has to be one text on all ranks, whatever each of them saw of it:
//
// - Proposals and decisions travel on the control connection and, once there are any, on a data
//   connection, so that a broken control connection does not keep a rank from the decision.
// - A rank is lost when its control connection and its data connections have ended. One connection
//   that breaks alone is the fault of neither end, and the text names both.
// - A time-out and a lost connection are only symptoms. The coordinator asks all ranks for a sign
//   of life (kInquiryMs at most) and accuses those that give none.
// - A member that hears no decision in time, or whose coordinator is gone, has nobody to ask. Its
//   cause is then the coordinator itself, in words that are the same on every rank.
//
// Listeners are called from poll, never from inside fail.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/iface/rendezvous.h"
#include "transports/tcp/reactor.h"
#include "transports/tcp/rendezvous_server.h"

namespace sotto::tcp {

// How long a member waits for the coordinator's decision.
inline constexpr int64_t kDecisionMs = 1500;
// How long the coordinator waits for signs of life before it decides.
inline constexpr int64_t kInquiryMs = 500;

inline int64_t ms_between(int64_t from_ns, int64_t to_ns) { return (to_ns - from_ns) / 1'000'000; }

class TcpControl;

// The data connections, as a second way for failures.
class FailureRoute {
 public:
  virtual ~FailureRoute() = default;
  // Sends a failure frame to the peer, if a connection to it can send.
  virtual void send_failure(int32_t peer, const std::string& payload) = 0;
  // What was to be sent so was handed to the network, or never will be.
  virtual bool failure_sent(int32_t peer) const = 0;
  // A data connection to the peer is open.
  virtual bool connected(int32_t peer) const = 0;
};

// Both ends of that way; each takes itself out when it ends.
struct FailureBridge {
  TcpControl* control = nullptr;
  FailureRoute* route = nullptr;
};

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
  void set_silence_limit(int64_t limit_ms) override;
  void established() override;
  void leave(Deadline deadline) override;

  // "rank 2 (pid 123 on host, 10.0.0.2:3456)"
  std::string describe_rank(int32_t rank) const;
  // The coordinator as this rank reaches it; empty on the coordinator.
  std::string coordinator_address() const;
  int32_t coordinator() const { return group_.coordinator; }
  // What has passed the control connection to a rank; null where there is none.
  std::shared_ptr<const LinkBytes> link_bytes(int32_t rank) const;

  // For the transport: where it becomes the route, and what it hears.
  const std::shared_ptr<FailureBridge>& bridge() const { return bridge_; }
  Status on_failure_frame(int32_t peer, wire::Bytes payload);
  void on_disconnected(int32_t peer);

 private:
  struct PendingGather {
    std::string what;
    int32_t what_rank = -1;  // who named it first
    std::vector<std::optional<std::string>> blobs;
    int32_t present = 0;
  };
  // A proposal that may be a symptom only.
  struct Inquiry {
    FailureCause cause;
    int64_t begin_ns = 0;
    std::vector<int32_t> asked;  // of them no sign of life has come yet
  };

  bool coordinates() const { return group_.rank == group_.coordinator; }
  ControlLink* link_of(int32_t rank) const;
  Status on_message(ControlLink& link, wire::FrameKind kind, wire::Bytes payload) override;
  void on_lost(ControlLink& link, const Status& why) override;
  Status on_gather(ControlLink& link, wire::Bytes payload);
  Status on_gathered(wire::Bytes payload);
  Status on_heartbeat(ControlLink& link, wire::Bytes payload);
  void on_bye(ControlLink& link);
  void contribute(int32_t rank, uint64_t sequence, std::string what, std::string blob);
  void complete_gather();
  std::string missing_text() const;
  Status failure_status() const;
  void tick();
  void send_heartbeats();
  void report_missing();

  // Failure (control_failure.cc).
  bool connected(int32_t rank) const;
  FailureCause lost_rank(int32_t rank, const Status& why) const;
  FailureCause lost_connection(int32_t peer, const Status& why, bool damaged) const;
  FailureCause lost_coordinator() const;
  void propose(FailureCause cause);
  void consider(FailureCause cause);
  void inquire(FailureCause cause);
  void conclude();
  FailureCause silent_ranks(Code code, const std::vector<int32_t>& ranks) const;
  void tell(int32_t rank, const std::string& payload);
  void decide(FailureCause cause);
  void settle();
  void adopt(FailureCause cause);
  void check_decision(int64_t now_ns);
  void check_silence(int64_t now_ns);

  std::shared_ptr<Reactor> reactor_owner_;
  Reactor& reactor_;
  Membership group_;
  int64_t heartbeat_ms_;
  std::shared_ptr<void> ticker_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  std::shared_ptr<FailureBridge> bridge_ = std::make_shared<FailureBridge>();
  ControlListener* listener_ = nullptr;
  std::optional<FailureCause> failure_;
  std::optional<FailureCause> proposed_;  // member: waits for the coordinator's decision
  int64_t proposed_ns_ = 0;
  bool overdue_ = false;                  // the tick before found it late
  std::optional<Inquiry> inquiry_;        // coordinator
  std::optional<FailureCause> decision_;  // coordinator: told to all, and adopted soon
  int64_t decided_ns_ = 0;
  std::vector<Status> lost_;  // by rank: why its control connection ended; OK: it has not
  bool established_ = false;
  bool left_ = false;
  std::vector<bool> bye_;  // by rank

  uint64_t sequence_ = 0;  // of the next all-gather
  PendingGather gather_;   // coordinator: the one in progress
  std::optional<std::vector<std::string>> gathered_;
  std::string waiting_;           // member: whom the coordinator waits for
  std::string reported_missing_;  // coordinator: what it has told about that
  int64_t last_heartbeat_ns_;
  int64_t silence_limit_ms_ = 0;
  int64_t last_tick_ns_;
  int64_t awake_since_ns_;  // before it this process did not run, and could not hear anybody
  std::vector<uint32_t> silent_ms_;  // member: as the coordinator reported
  int64_t silent_at_ns_ = 0;
};

}  // namespace sotto::tcp
