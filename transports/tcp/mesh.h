// Connects every rank of a group with every other: each listens, addresses are exchanged over the
// control plane, the lower rank connects, both sides say hello with the group's token.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/iface/rendezvous.h"
#include "transports/tcp/control_plane.h"
#include "transports/tcp/net.h"
#include "transports/tcp/tcp_transport.h"

namespace sotto::tcp {

Result<std::unique_ptr<Transport>> connect_mesh(const std::shared_ptr<Reactor>& reactor,
                                                const ListenPlace& place, FlowLimits limits,
                                                TcpControl& control, TransferSink& sink,
                                                Driver& driver, Deadline deadline);

}  // namespace sotto::tcp
