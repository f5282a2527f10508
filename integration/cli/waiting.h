// Time, signals and descriptors of the loops that sotto-run waits in.
#pragma once

#include <poll.h>

#include <cstdint>
#include <vector>

namespace sotto_cli {

inline constexpr int64_t kNsPerS = 1000000000;
inline constexpr int64_t kNever = INT64_MAX;

// CLOCK_MONOTONIC, nanoseconds.
int64_t now_ns();
int64_t to_ns(double seconds);

// Blocks SIGCHLD, what people and systems end or stop a job with (SIGINT, SIGTERM, SIGHUP,
// SIGTSTP), and what they tell its ranks with (SIGUSR1, SIGUSR2); returns the descriptor that they
// are read from, -1 with errno if there is none. What this process was started to ignore, as
// nohup(1) does with SIGHUP, stays ignored: Linux would queue it if it were blocked. SIGCHLD alone
// is taken in any case. SIGPIPE is ignored from now on.
int open_signal_fd();
// The signals that have come since the last call, each kind at most once.
std::vector<int> take_signals(int signal_fd);

// Waits for one of the descriptors, at the longest until due_ns (kNever: without end).
void poll_until(std::vector<pollfd>& fds, int64_t due_ns);

}  // namespace sotto_cli
