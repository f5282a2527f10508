// The control plane of a group: a star around the coordinator, over the connections of the
// rendezvous.
//
// Failure. Members propose causes; the coordinator decides on the first cause and sends it to all.
// A decision is one text on all ranks, whatever each of them saw:
//
// - Proposals and decisions travel on the control connection and, once there is one, on a data
//   connection. So they arrive although the control connection is broken.
// - A rank is lost when its control connection and its data connections have ended. A single broken
//   connection is the fault of neither end, and the text names both.
// - A time-out and a lost connection are only symptoms. The coordinator asks all ranks for a sign
//   of life (kInquiryMs at most) and accuses those that give none.
// - For a member that receives no decision in time, or whose coordinator is gone, the cause is the
//   coordinator itself, in the same words on every rank.
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
#include "transports/tcp/service_relay.h"

namespace sotto::tcp {

// Longest time that a member waits for the coordinator's decision.
inline constexpr int64_t kDecisionMs = 1500;
// Longest time that the coordinator waits for signs of life before it decides.
inline constexpr int64_t kInquiryMs = 500;

inline int64_t ms_between(int64_t from_ns, int64_t to_ns) { return (to_ns - from_ns) / 1'000'000; }

class TcpControl;

// The data connections, as a second way of failure frames.
class FailureRoute {
 public:
  virtual ~FailureRoute() = default;
  // Sends a failure frame to the peer, where a connection to it can send.
  virtual void send_failure(int32_t peer, const std::string& payload) = 0;
  // All failure frames to the peer were handed to the network, or never will be.
  virtual bool failure_sent(int32_t peer) const = 0;
  // A data connection to the peer is open.
  virtual bool connected(int32_t peer) const = 0;
};

// Both ends of that way. Each end removes itself when it is destroyed.
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
  Status send_service(int32_t to, uint32_t channel, std::string_view bytes) override;
  void set_service_listener(uint32_t channel, ServiceListener* listener) override;
  void leave(Deadline deadline) override;

  // "rank 2 (pid 123 on host, 10.0.0.2:3456)"
  std::string describe_rank(int32_t rank) const;
  // The address at which this rank reaches the coordinator; empty on the coordinator.
  std::string coordinator_address() const;
  int32_t coordinator() const { return group_.coordinator; }
  // Bytes on the control connection to a rank; null: there is no such connection.
  std::shared_ptr<const LinkBytes> link_bytes(int32_t rank) const;

  // For the transport: where it registers as the route, and its events.
  const std::shared_ptr<FailureBridge>& bridge() const { return bridge_; }
  Status on_failure_frame(int32_t peer, wire::Bytes payload);
  void on_disconnected(int32_t peer);

 private:
  struct PendingGather {
    std::string what;
    int32_t what_rank = -1;  // the first rank that came, whose name for it `what` is
    std::vector<std::optional<std::string>> blobs;
    int32_t present = 0;
  };
  // A proposal that may be only a symptom.
  struct Inquiry {
    FailureCause cause;
    int64_t begin_ns = 0;
    std::vector<int32_t> asked;  // ranks without a sign of life since
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
  void tick();
  void send_heartbeats();
  void report_missing();

  // Failure (control_failure.cc).
  bool connected(int32_t rank) const;
  FailureCause lost_rank(int32_t rank, const Status& why) const;
  FailureCause lost_connection(int32_t peer, const Status& why, bool damaged) const;
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
  ServiceRelay service_;
  std::shared_ptr<void> ticker_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  std::shared_ptr<FailureBridge> bridge_ = std::make_shared<FailureBridge>();
  ControlListener* listener_ = nullptr;
  std::optional<FailureCause> failure_;
  std::optional<FailureCause> proposed_;  // member: awaiting the coordinator's decision
  int64_t proposed_ns_ = 0;
  bool overdue_ = false;                  // late already at the last tick
  std::optional<Inquiry> inquiry_;        // coordinator
  std::optional<FailureCause> decision_;  // coordinator: sent to all, adopted soon
  int64_t decided_ns_ = 0;
  std::vector<Status> lost_;  // by rank: the end of its control connection; OK: none
  bool established_ = false;
  bool left_ = false;
  std::vector<bool> bye_;  // by rank

  uint64_t sequence_ = 0;  // of the next all-gather
  PendingGather gather_;   // coordinator: the one in progress
  std::optional<std::vector<std::string>> gathered_;
  std::string reported_missing_;  // coordinator: the last report of missing ranks
  int64_t last_heartbeat_ns_;
  int64_t silence_limit_ms_ = 0;
  int64_t last_tick_ns_;
  int64_t awake_since_ns_;  // end of the last time in which this process did not run
  wire::Heartbeat told_;    // member: the coordinator's last word of each
  int64_t silent_at_ns_ = 0;
};

}  // namespace sotto::tcp
