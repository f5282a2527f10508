// What plans know of UCX.
#pragma once

#include "core/iface/transport.h"

namespace sotto::ucx {

// Messages as long as those of TCP, so a comm has the same messages and bytes over both.
inline constexpr TransportCaps kCaps{.name = "ucx", .segment_bytes = 128 * 1024};

}  // namespace sotto::ucx
