// What plans know of TCP.
#pragma once

#include "core/iface/transport.h"

namespace sotto::tcp {

inline constexpr TransportCaps kCaps{.name = "tcp",
                                     // Above it the end of a collective waits for the slowest
                                     // connection, and urgent messages wait for bulk: 256 KiB take
                                     // 6 % longer for 4 MB at 1 Gbit/s. Below it calls cost:
                                     // 64 KiB take 20 % longer where links do not limit.
                                     .segment_bytes = 128 * 1024};

}  // namespace sotto::tcp
