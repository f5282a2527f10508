// The data plane of a group: frames over sockets, and the failure frames of the control plane.
//
// Threads: the driving thread; counters from any.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/iface/transport.h"
#include "transports/framed/framed_transport.h"
#include "transports/tcp/control_link.h"
#include "transports/tcp/failure_agreement.h"
#include "transports/tcp/reactor.h"
#include "transports/tcp/stream_carrier.h"

namespace sotto::tcp {

class TcpControl;

// A peer, after the handshakes of the set-up.
struct MeshPeer {
  std::vector<std::unique_ptr<StreamCarrier>> streams;  // empty: this rank itself
  std::string name;                                     // "rank 2 (pid 123 on host, 10.0.0.2:3456)"
  std::shared_ptr<const LinkBytes> control_bytes;       // null: no control connection to this peer
};

class TcpTransport final : public framed::FramedTransport,
                           public FailureRoute,
                           private framed::FailureListener {
 public:
  // peers: by rank.
  TcpTransport(const std::shared_ptr<Reactor>& reactor, int32_t rank, std::vector<MeshPeer> peers,
               TransferSink& sink, framed::FlowLimits limits);
  ~TcpTransport() override;
  // From now on failure frames also travel on data connections. control: of the same group.
  void carry_failures(TcpControl& control);
  // What makes connections that are not there yet. It ends before they do.
  void keep(std::shared_ptr<void> mesh) { mesh_ = std::move(mesh); }

  // Of epoch 0: with the bytes of the control connection.
  TransferCounters counters(uint64_t comm, int32_t peer) const override;
  void send_failure(int32_t peer, const std::string& payload) override;
  bool failure_sent(int32_t peer) const override;
  bool connected(int32_t peer) const override;

 private:
  Status on_failure_frame(int32_t peer, wire::Bytes payload) override;
  void on_disconnected(int32_t peer) override;

  std::vector<std::shared_ptr<const LinkBytes>> control_bytes_;
  std::shared_ptr<void> ticker_;
  std::shared_ptr<FailureBridge> bridge_;  // null: no failure frames on data connections
  std::shared_ptr<void> mesh_;             // null: all connections are there
};

}  // namespace sotto::tcp
