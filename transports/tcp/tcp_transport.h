// The data plane of a group: one data link per peer.
//
// Threads: the driving thread; counters from any.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/iface/transport.h"
#include "transports/tcp/control_link.h"
#include "transports/tcp/control_plane.h"
#include "transports/tcp/data_link.h"
#include "transports/tcp/reactor.h"

namespace sotto::tcp {

// A peer after the handshake.
struct MeshPeer {
  std::vector<std::unique_ptr<FrameStream>> streams;  // empty: this rank itself
  std::string name;                                   // "rank 2 (pid 123 on host, 10.0.0.2:3456)"
  std::shared_ptr<const LinkBytes> control_bytes;     // null: no control connection to this peer
};

class TcpTransport final : public MessageTransport, public FailureRoute, private FailureListener {
 public:
  // peers: by rank.
  TcpTransport(std::shared_ptr<Reactor> reactor, int32_t rank, std::vector<MeshPeer> peers,
               TransferSink& sink, FlowLimits limits);
  ~TcpTransport() override;
  // From now on failure frames also travel on data connections. control: of the same group.
  void carry_failures(TcpControl& control);

  const TransportCaps& caps() const override;
  uint64_t header_bytes(uint64_t message_bytes) const override;
  Status post_op(const OpPosting& op) override;
  void ready(int32_t peer, const OpPosting& op, uint32_t last_round, uint64_t largest) override;
  void retire(const OpPosting& op) override;
  void cancel(const OpPosting& op) override;
  void send(Transfer& transfer) override;
  void recv(Transfer& transfer) override;
  std::string route(int32_t peer) const override;
  TransferCounters counters(uint64_t comm, int32_t peer) const override;
  void close(Deadline deadline) override;
  void send_failure(int32_t peer, const std::string& payload) override;
  bool failure_sent(int32_t peer) const override;
  bool connected(int32_t peer) const override;

 private:
  Status on_failure_frame(int32_t peer, wire::Bytes payload) override;
  void on_disconnected(int32_t peer) override;
  DataLink* link(int32_t peer) const;
  void tick();

  std::shared_ptr<Reactor> reactor_;
  std::vector<std::shared_ptr<const LinkBytes>> control_bytes_;
  TransportCore core_;
  std::vector<std::unique_ptr<DataLink>> links_;  // by rank; null: itself
  std::shared_ptr<void> ticker_;
  std::shared_ptr<FailureBridge> bridge_;  // null: no failure frames on data connections
  bool closed_ = false;
};

}  // namespace sotto::tcp
