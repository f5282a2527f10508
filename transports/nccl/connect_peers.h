// The connections of a communicator, made with it.
//
// NCCL connects two ranks when they first have messages for each other. That allocates, which may
// wait for the device, and takes until both ranks have come. So it is done during set-up, when
// nothing is queued, and operations meet none of it.
#pragma once

#include "core/iface/rendezvous.h"
#include "transports/nccl/communicator.h"
#include "transports/nccl/in_flight_groups.h"

namespace sotto::nccl {

// Exchanges a header with every other rank of the communicator, in one group on the stream.
// Collective; nothing else is in flight. A failure of the control plane ends the wait. TIMEOUT
// names the ranks that are missing. After an error the group is still in flight.
Status connect_peers(InFlightGroups& groups, const Communicator& all, cudaStream_t stream,
                     const ControlPlane& control, Driver& driver, Deadline deadline);

}  // namespace sotto::nccl
