// The control plane of a group: a star around the coordinator, over the connections of the
// rendezvous. It hands what comes to the parts that know what to do with it.
//
// Listeners are called from poll, never from inside fail.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/iface/rendezvous.h"
#include "transports/tcp/all_gather.h"
#include "transports/tcp/control_star.h"
#include "transports/tcp/failure_agreement.h"
#include "transports/tcp/reactor.h"
#include "transports/tcp/rendezvous_server.h"
#include "transports/tcp/service_relay.h"
#include "transports/tcp/signs_of_life.h"

namespace sotto::tcp {

class TcpControl final : public ControlPlane, public ControlLinkOwner {
 public:
  TcpControl(std::shared_ptr<Reactor> reactor, Membership membership, int64_t heartbeat_ms);

  int32_t rank() const override { return star_.rank(); }
  int32_t size() const override { return star_.size(); }
  uint64_t token() const override { return star_.token(); }
  Result<std::vector<std::string>> all_gather(std::string_view what, std::string_view mine,
                                              Driver& driver, Deadline deadline) override;
  void fail(const FailureCause& cause) override { agreement_.fail(cause); }
  const std::optional<FailureCause>& failure() const override { return agreement_.failure(); }
  void set_listener(ControlListener* listener) override { listener_ = listener; }
  int64_t silent_ms(int32_t rank) const override { return signs_.silent_ms(rank); }
  void set_silence_limit(int64_t limit_ms) override;
  void established() override;
  Status send_service(int32_t to, uint32_t channel, std::string_view bytes) override;
  void set_service_listener(uint32_t channel, ServiceListener* listener) override;
  void leave(Deadline deadline) override;

  // "rank 2 (pid 123 on host, 10.0.0.2:3456)"
  std::string describe_rank(int32_t rank) const { return star_.describe(rank); }
  int32_t coordinator() const { return star_.coordinator(); }
  // As ControlStar has them.
  std::string coordinator_address() const { return star_.coordinator_address(); }
  std::shared_ptr<const LinkBytes> link_bytes(int32_t rank) const { return star_.link_bytes(rank); }
  // Expires with it.
  std::weak_ptr<const void> alive() const { return alive_; }
  // For the transport: where it registers as the route of failure frames.
  const std::shared_ptr<FailureBridge>& failure_bridge() const { return agreement_.bridge(); }

 private:
  Status on_message(ControlLink& link, wire::FrameKind kind, wire::Bytes payload) override;
  void on_lost(ControlLink& link, const Status& why) override;
  Status on_gather(int32_t from, wire::Bytes payload);
  Status on_heartbeat(wire::Bytes payload);
  void on_bye(int32_t from);
  void decide(std::optional<FailureCause> cause);
  void failed();
  void start_ticking();
  void tick();

  std::shared_ptr<Reactor> reactor_;
  ControlStar star_;
  AllGather gather_;
  SignsOfLife signs_;
  FailureAgreement agreement_;
  ServiceRelay service_;
  ControlListener* listener_ = nullptr;
  Timers::Timer ticker_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace sotto::tcp
