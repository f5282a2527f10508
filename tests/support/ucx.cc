#include "tests/support/ucx.h"

namespace sotto::test {

const char* why_no_ucx() {
#if SOTTO_TEST_UCX
  return nullptr;
#elif defined(__SANITIZE_THREAD__)
  return "UCX is not instrumented: ThreadSanitizer would see races in it";
#else
  return "this build has no UCX transport (no ucp/api/ucp.h, or SOTTO_WITH_UCX=OFF)";
#endif
}

}  // namespace sotto::test
