// Why an operation makes no progress.
#pragma once

#include "core/engine/op.h"
#include "core/iface/rendezvous.h"

namespace sotto {

// TIMEOUT of an operation that has made no progress for `stalled_ns`: which peers it waits for, and
// which one is accused. Peers that have sent something wait themselves, for a rank that has sent
// nothing.
// control: the channel's, or null.
FailureCause stall_cause(const OpRequest& request, const ControlPlane* control, int64_t stalled_ns);

}  // namespace sotto
