// The data connections of a group, between all pairs of ranks or some. Each rank listens, address
// records go over the control plane, and the lower rank of a pair connects. The handshake is a
// hello in each direction, with the token of the group.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/iface/rendezvous.h"
#include "transports/tcp/control_plane.h"
#include "transports/tcp/net.h"
#include "transports/tcp/tcp_transport.h"

namespace sotto::tcp {

// Of this rank; of a group the smallest of each counts.
struct MeshLimits {
  framed::FlowLimits flow;
  uint32_t connections = 1;  // to each peer
};

Result<std::unique_ptr<Transport>> connect_mesh(const std::shared_ptr<Reactor>& reactor,
                                                const ListenPlace& place, MeshLimits limits,
                                                TcpControl& control, std::span<const int32_t> peers,
                                                TransferSink& sink, Driver& driver,
                                                Deadline deadline);

}  // namespace sotto::tcp
