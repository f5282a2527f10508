// TCP for ranks of a test that fail: signs of life come often.
#pragma once

#include "tests/conformance/transport_suite.h"
#include "transports/tcp/tcp_backend.h"

namespace sotto::test {

inline TransportCase tcp_case() {
  return {"tcp", [](const Clock& clock) {
            TcpOptions options;
            options.clock = &clock;
            options.heartbeat_ms = 50;
            return make_tcp_backend(options);
          }};
}

}  // namespace sotto::test
