#include "tests/conformance/transport_suite.h"
#include "tests/support/faulty_transport.h"
#include "tests/support/joined_backend.h"
#include "transports/inproc/inproc_backend.h"
#include "transports/tcp/tcp_backend.h"

namespace sotto::test {
namespace {

// The same through a layer that delays and reorders.
Result<std::unique_ptr<Backend>> make_delayed(const Clock& clock) {
  auto base = make_inproc_backend(clock);
  if (!base.ok()) return base.status();
  return make_faulty_backend(base.take(), {.seed = 11, .max_delay_polls = 5});
}

// Ranks of one process in a group that has met over sockets.
Result<std::unique_ptr<Backend>> make_joined_by_tcp(const Clock& clock) {
  TcpOptions options;
  options.clock = &clock;
  options.heartbeat_ms = 50;
  SOTTO_ASSIGN(std::unique_ptr<Backend> rendezvous, make_tcp_backend(options));
  SOTTO_ASSIGN(std::unique_ptr<Backend> inproc, make_inproc_backend(clock));
  return std::unique_ptr<Backend>(
      std::make_unique<JoinedBackend>(std::move(rendezvous), std::move(inproc)));
}

INSTANTIATE_TEST_SUITE_P(Inproc, TransportSuite,
                         testing::Values(TransportCase{"inproc", make_inproc_backend},
                                         TransportCase{"delayed", make_delayed},
                                         TransportCase{"joined_by_tcp", make_joined_by_tcp, true,
                                                       true}),
                         case_name);

}  // namespace
}  // namespace sotto::test
