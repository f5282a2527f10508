#include "tests/conformance/transport_suite.h"
#include "transports/tcp/tcp_backend.h"

namespace sotto::test {
namespace {

Result<std::unique_ptr<Backend>> make_tcp(const Clock& clock) {
  TcpOptions options;
  options.clock = &clock;
  options.heartbeat_ms = 50;
  return make_tcp_backend(options);
}

INSTANTIATE_TEST_SUITE_P(Tcp, TransportSuite, testing::Values(TransportCase{"tcp", make_tcp}),
                         case_name);

}  // namespace
}  // namespace sotto::test
