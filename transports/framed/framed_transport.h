// Messages by their keys over frame carriers: one data link per peer. A transport derives from it,
// gives it carriers, polls them in its poller, and calls tick.
//
// Threads: the driving thread; counters from any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/iface/transport.h"
#include "transports/framed/data_link.h"
#include "transports/framed/peer.h"

namespace sotto::framed {

class FramedTransport : public MessageTransport {
 public:
  // The time between two calls of tick.
  static constexpr int64_t kTickMs = 50;

  // caps: outlives the transport. poller: serves the carriers; kept until they have ended. clock:
  // of all deadlines. peers: by rank.
  FramedTransport(const TransportCaps& caps, std::shared_ptr<Poller> poller, const Clock& clock,
                  int32_t rank, std::vector<PeerCarriers> peers, TransferSink& sink,
                  FlowLimits limits);

  const TransportCaps& caps() const final { return caps_; }
  uint64_t header_bytes(uint64_t message_bytes) const final;
  Status post_op(const OpDescriptor& op) final;
  void ready(int32_t peer, const OpDescriptor& op, uint32_t last_round, uint64_t largest) final;
  void complete(const OpDescriptor& op) final;
  void cancel(const OpDescriptor& op) final;
  void send(Transfer& transfer) final;
  void recv(Transfer& transfer) final;
  // The name of the transport and the address of the peer's first carrier.
  std::string route(int32_t peer) const final;
  TransferCounters counters(uint64_t comm, int32_t peer) const override;
  void leave(uint64_t comm) final;
  void close(Deadline deadline) final;

  // Announces operations that have waited long, and reports lost peers.
  void tick();

 protected:
  // From now on failure frames are taken. own_name: of this rank, for errors about connections.
  void carry_failures(FailureListener& listener, std::string own_name);
  // Null: this rank itself, a rank that is not linked, or none.
  DataLink* link(int32_t peer) const;

 private:
  const TransportCaps& caps_;
  const std::shared_ptr<Poller> poller_;
  TransportCore core_;
  std::vector<std::unique_ptr<DataLink>> links_;  // by rank
  bool closed_ = false;
};

}  // namespace sotto::framed
