// Tests of other devices keep their tensors in vectors. In a program with pinned_new.cc, which
// replaces operator new, these can lie in memory that CUDA has pinned, so that a CUDA device reads
// and writes them in the order of its lanes.
#pragma once

namespace sotto::test {

void pin_what_this_thread_allocates();

}  // namespace sotto::test
