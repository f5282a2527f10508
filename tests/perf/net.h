// Benchmarks that are Python programs. For net/run.py and net/overlap.py this program is the ranks
// that use Sotto.
#pragma once

#include <string>
#include <vector>

namespace sotto::perf {

// `sotto bench net ..` and the like: replaces this process by a script of tests/perf with these
// arguments. Returns only on error, as std::runtime_error.
[[noreturn]] void run_script(const std::string& name, const std::vector<std::string>& arguments);

// `sotto bench gpu ..`: replaces this process by sotto-perf-gpu, which lies beside it. The same.
// name: what the user has typed in front of gpu.
[[noreturn]] void run_gpu(const std::string& name, const std::vector<std::string>& arguments);

// One rank, which does what run.py tells it through the socket `control` until that is closed.
// Rank, size and rendezvous come from the environment. Returns the exit code.
int run_net_rank(const std::string& control);
// The same of net/overlap.py.
int run_overlap_rank(const std::string& control);

}  // namespace sotto::perf
