// Tests of other devices keep their tensors in vectors. In a program with pinned_new.cc, which
// replaces operator new, these can lie in memory that CUDA has pinned, so that a CUDA device reads
// and writes them in the order of its lanes. Most devices reach no other memory of the host.
//
// What is written up to 16 bytes in front of such memory or behind it ends the process when the
// memory is given back. With PINNED_ALLOCATIONS=own in the environment each is an allocation of
// CUDA's that ends where it ends, so that compute-sanitizer sees all accesses behind it, and only
// what is written in front of it ends the process.
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
