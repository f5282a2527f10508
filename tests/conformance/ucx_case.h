// UCX in the tests of transports.
#pragma once

#include <cstdlib>
#include <memory>

#include "tests/conformance/transport_suite.h"
#include "tests/support/joined_backend.h"
#include "transports/tcp/tcp_backend.h"
#include "transports/ucx/ucx_backend.h"

namespace sotto::test {

// What goes between hosts.
inline const bool kSocketsAlone = ::setenv("UCX_TLS", "tcp", 1) == 0;

// As SOTTO_UCX_LIBRARY says: a process can have one UCX only.
inline UcxOptions options_of_ucx() {
  const Environment environment = process_environment();
  ParamReader reader(environment);
  return ucx_options(Params(), reader.read<ucx::Params>());
}

inline TransportCase over_ucx() {
  return {"ucx",
          [](const Clock& clock) -> Result<std::unique_ptr<Backend>> {
            TcpOptions tcp;
            tcp.clock = &clock;
            tcp.heartbeat_ms = 50;
            SOTTO_ASSIGN(std::unique_ptr<Backend> rendezvous, make_tcp_backend(tcp));
            UcxOptions options = options_of_ucx();
            options.clock = &clock;
            SOTTO_ASSIGN(std::unique_ptr<Backend> transport, make_ucx_backend(options));
            return std::unique_ptr<Backend>(
                std::make_unique<JoinedBackend>(std::move(rendezvous), std::move(transport)));
          },
          true, true};
}

}  // namespace sotto::test
