// The machine that this process runs on.
//
// Threads: any.
#pragma once

#include <string>

namespace sotto {

// The name that the kernel has for it.
std::string host_name();
// A text that is another one after every start of a kernel; empty: not known.
std::string boot_id();

}  // namespace sotto
