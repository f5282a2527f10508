// The data connections of a group, between all pairs of ranks or some. Each rank listens, address
// records go over the control plane, and the lower rank of a pair connects. A pair's connections
// are made in the set-up, or when they are first used (LinkPeers::lazy).
//
// A pair is used when one of its ranks sends on it or expects a message. The lower rank then
// connects. The higher one waits: for each message that it sends or awaits there is a receive or a
// send on the lower rank, which connects for that. It asks for the connection (kConnectChannel)
// only when it has waited for kAskMs: operations may differ, and then the messages that have to
// show it need a way. Connections with the coordinator are never lazy: they are the second way of
// failures.
//
// Threads: the driving thread.
#pragma once

#include <memory>

#include "core/iface/rendezvous.h"
#include "transports/tcp/address_record.h"
#include "transports/tcp/control_plane.h"
#include "transports/tcp/net.h"
#include "transports/tcp/tcp_transport.h"

namespace sotto::tcp {

// Errors name the peers whose connections were not made, and are told to all ranks.
Result<std::unique_ptr<Transport>> connect_mesh(const std::shared_ptr<Reactor>& reactor,
                                                const ListenPlace& place, MeshLimits limits,
                                                TcpControl& control, const LinkPeers& peers,
                                                TransferSink& sink, Driver& driver,
                                                Deadline deadline);

}  // namespace sotto::tcp
