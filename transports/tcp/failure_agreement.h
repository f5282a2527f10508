// Agreement of a group on one cause of failure.
//
// Members propose causes; the coordinator decides on the first cause and sends it to all. A
// decision is one text on all ranks, whatever each of them saw:
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
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/iface/rendezvous.h"
#include "core/wire/control.h"
#include "transports/tcp/control_peers.h"
#include "transports/tcp/signs_of_life.h"

namespace sotto::tcp {

// Longest time that a member waits for the coordinator's decision.
inline constexpr int64_t kDecisionMs = 1500;
// Longest time that the coordinator waits for signs of life before it decides.
inline constexpr int64_t kInquiryMs = 500;
// Longest time that a decision waits to be sent on data connections.
inline constexpr int64_t kSendMs = 200;

class FailureAgreement;

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
  FailureAgreement* agreement = nullptr;
  FailureRoute* route = nullptr;
};

// The end of a control connection.
struct LostConnection {
  Status why;               // PEER_LOST: closed or reset; else wrong bytes have arrived
  bool damaged = false;     // the bytes were damaged on the way
  bool unanswered = false;  // the host at the other end acknowledges nothing
};

class FailureAgreement {
 public:
  // failed: called once, when the cause is certain.
  FailureAgreement(ControlPeers& peers, SignsOfLife& signs, const Clock& clock,
                   std::function<void()> failed);
  ~FailureAgreement() { bridge_->agreement = nullptr; }
  FailureAgreement(const FailureAgreement&) = delete;
  FailureAgreement& operator=(const FailureAgreement&) = delete;

  const std::optional<FailureCause>& failure() const { return failure_; }
  // What this rank has seen. Counts if there is no earlier cause.
  void fail(FailureCause cause);
  // On the coordinator: a cause that is no symptom.
  void decide(FailureCause cause);

  // A failure frame of the peer, on either way.
  Status on_frame(int32_t peer, wire::Bytes payload);
  // The control connection to the peer has ended.
  void on_lost(int32_t peer, const LostConnection& lost);
  // The last data connection to the peer has ended.
  void on_disconnected(int32_t peer);
  // The peer has said bye.
  void on_left(int32_t peer);
  // A heartbeat has come: signs of life may complete an inquiry.
  void on_sign();
  // Called every SignsOfLife::tick_ms(): what has become late.
  void tick();
  // Before this rank leaves the group: decides what is undecided.
  void conclude_at_once();

  // Where the transport registers as the route.
  const std::shared_ptr<FailureBridge>& bridge() const { return bridge_; }

 private:
  // A proposal that may be only a symptom.
  struct Inquiry {
    FailureCause cause;
    int64_t begin_ns = 0;
    std::vector<int32_t> asked;  // ranks without a sign of life since
  };

  bool connected(int32_t rank) const;
  FailureCause lost_coordinator() const;
  FailureCause lost_rank(int32_t rank, const Status& why) const;
  FailureCause lost_connection(int32_t peer, const LostConnection& lost) const;
  FailureCause silent_ranks(Code code, const std::vector<int32_t>& ranks) const;
  void tell(int32_t rank, const std::string& payload);
  void adopt(FailureCause cause);
  // On a member.
  void propose(FailureCause cause);
  void adopt_alone(FailureCause cause);
  // On the coordinator.
  void consider(FailureCause cause);
  void inquire(FailureCause cause);
  void conclude();
  void settle();
  // On any rank.
  void check_decision();
  void check_silence();

  ControlPeers& peers_;
  SignsOfLife& signs_;
  const Clock& clock_;
  const std::function<void()> failed_;
  std::shared_ptr<FailureBridge> bridge_ = std::make_shared<FailureBridge>();
  std::optional<FailureCause> failure_;
  std::vector<Status> lost_;  // by rank: the end of its control connection; OK: none
  // Member: awaits the coordinator's decision.
  std::optional<FailureCause> proposed_;
  int64_t proposed_ns_ = 0;
  bool overdue_ = false;  // late already at the last tick
  // Coordinator.
  std::optional<Inquiry> inquiry_;
  std::optional<FailureCause> decision_;  // sent to all, adopted soon
  int64_t decided_ns_ = 0;
};

}  // namespace sotto::tcp
