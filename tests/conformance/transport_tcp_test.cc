#include "tests/conformance/transport_suite.h"
#include "transports/tcp/tcp_backend.h"

namespace sotto::test {
namespace {

TransportCase over(const char* name, uint32_t connections) {
  return {name,
          [connections](const Clock& clock) {
            TcpOptions options;
            options.clock = &clock;
            options.heartbeat_ms = 50;
            options.connections = connections;
            return make_tcp_backend(options);
          },
          true, true};
}

INSTANTIATE_TEST_SUITE_P(Tcp, TransportSuite,
                         testing::Values(over("tcp_1_connection", 1), over("tcp", 2),
                                         over("tcp_4_connections", 4)),
                         case_name);

}  // namespace
}  // namespace sotto::test
