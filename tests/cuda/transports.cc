#include "tests/cuda/transports.h"

namespace sotto::test {

std::vector<const char*> transports_under_test() { return {"inproc", "tcp"}; }

}  // namespace sotto::test
