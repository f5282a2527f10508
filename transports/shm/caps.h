// What plans know of shared memory.
#pragma once

#include "core/iface/transport.h"

namespace sotto::shm {

// Messages as long as those of TCP, which the same plans may use between hosts. So a comm has the
// same messages and bytes wherever its ranks are.
inline constexpr TransportCaps kCaps{.name = "shm", .segment_bytes = 128 * 1024};

}  // namespace sotto::shm
