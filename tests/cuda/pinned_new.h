// Tests of other devices keep their tensors in vectors. In a program with pinned_new.cc, which
// replaces operator new, these can lie in memory that CUDA has pinned, so that a CUDA device reads
// and writes them in the order of its lanes. Most devices reach no other memory of the host.
#pragma once

#include "core/base/status.h"
#include "core/kernels/call.h"

namespace sotto::test {

// Null in programs without pinned_new.cc, like pinned_operands.
void pin_what_this_thread_allocates() __attribute__((weak));

bool is_pinned(const void* memory);
// (pinned_operands.cc) Whether the call's predicate, operands, lists and what these name are memory
// of the host that is pinned.
Status pinned_operands(const KernelCall& call) __attribute__((weak));

}  // namespace sotto::test
