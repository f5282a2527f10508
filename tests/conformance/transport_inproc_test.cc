#include "tests/conformance/transport_suite.h"
#include "transports/inproc/inproc_backend.h"

namespace sotto::test {
namespace {

INSTANTIATE_TEST_SUITE_P(Inproc, TransportSuite,
                         testing::Values(TransportCase{"inproc", make_inproc_backend}), case_name);

}  // namespace
}  // namespace sotto::test
