#include "integration/cli/waiting.h"

#include <signal.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace sotto_cli {
namespace {

constexpr int64_t kNsPerMs = 1000000;

bool is_ignored(int number) {
  struct sigaction action {};
  sigaction(number, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

}  // namespace

int64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * kNsPerS + t.tv_nsec;
}

int64_t to_ns(double seconds) {
  return static_cast<int64_t>(seconds * static_cast<double>(kNsPerS));
}

int open_signal_fd() {
  sigset_t set;
  sigemptyset(&set);
  signal(SIGCHLD, SIG_DFL);  // children of a process that ignores it leave no wait status
  signal(SIGPIPE, SIG_IGN);  // a reader that is gone ends no ranks: writes fail with EPIPE
  for (const int number : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGTSTP, SIGUSR1, SIGUSR2}) {
    if (!is_ignored(number)) sigaddset(&set, number);
  }
  sigprocmask(SIG_BLOCK, &set, nullptr);
  return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

std::vector<int> take_signals(int signal_fd) {
  std::vector<int> taken;
  signalfd_siginfo info{};
  while (read(signal_fd, &info, sizeof info) == static_cast<ssize_t>(sizeof info))
    taken.push_back(static_cast<int>(info.ssi_signo));
  return taken;
}

void poll_until(std::vector<pollfd>& fds, int64_t due_ns) {
  int wait_ms = -1;
  if (due_ns != kNever) {
    const int64_t left_ms = (due_ns - now_ns() + kNsPerMs - 1) / kNsPerMs;
    wait_ms = static_cast<int>(std::clamp<int64_t>(left_ms, 0, INT32_MAX));
  }
  if (poll(fds.data(), fds.size(), wait_ms) <= 0) {
    for (pollfd& fd : fds) fd.revents = 0;
  }
}

}  // namespace sotto_cli
