// How often this process asks for memory: malloc and its relatives, under every operator new, in
// the program and in all its libraries.
#pragma once

#include <cstdint>

namespace sotto::perf {

// Calls so far, of all threads. Threads: any.
uint64_t allocations();
// False under a sanitizer, which has the allocator to itself: nothing is counted.
bool counts_allocations();

}  // namespace sotto::perf
