// Which transports the tests of same_bits_test.cc run over: each program that they are part of says
// it.
#pragma once

#include <vector>

namespace sotto::test {

std::vector<const char*> transports_under_test();

}  // namespace sotto::test
