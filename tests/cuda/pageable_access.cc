// In place of pinned_new.cc in a program under sanitizers, which have an operator new of their own:
// devices of the fake runtime reach all memory of the host.
#include "tests/cuda/pinned_new.h"
#include "tests/support/fake_cuda/fake_cuda.h"

namespace sotto::test {
namespace {

const bool configured = [] {
  fake_cuda::configure({.pageable_access = true});
  return true;
}();

}  // namespace

void pin_what_this_thread_allocates() {}

}  // namespace sotto::test
