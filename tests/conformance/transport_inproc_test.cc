#include "tests/conformance/transport_suite.h"
#include "tests/support/faulty_transport.h"
#include "transports/inproc/inproc_backend.h"

namespace sotto::test {
namespace {

// The same through a layer that delays and reorders.
Result<std::unique_ptr<Backend>> make_delayed(const Clock& clock) {
  auto base = make_inproc_backend(clock);
  if (!base.ok()) return base.status();
  return make_faulty_backend(base.take(), {.seed = 11, .max_delay_polls = 5});
}

INSTANTIATE_TEST_SUITE_P(Inproc, TransportSuite,
                         testing::Values(TransportCase{"inproc", make_inproc_backend},
                                         TransportCase{"delayed", make_delayed}),
                         case_name);

}  // namespace
}  // namespace sotto::test
