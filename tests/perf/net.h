// The network benchmarks: tests/perf/net/run.py measures; this program is our side's ranks.
#pragma once

#include <string>
#include <vector>

namespace sotto::perf {

// `sotto bench net ..`: replaces this process by run.py with these arguments. Returns only on
// error, as std::runtime_error.
[[noreturn]] void run_net(const std::vector<std::string>& arguments);

// One rank, which does what run.py tells it through the socket `control` until that is closed.
// Rank, size and rendezvous come from the environment. Returns the exit code.
int run_net_rank(const std::string& control);

}  // namespace sotto::perf
