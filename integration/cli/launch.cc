#include "integration/cli/launch.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

namespace sotto_cli {
namespace {

struct Pipe {
  int read_end = -1;
  int write_end = -1;
  bool open() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return false;
    read_end = ends[0];
    write_end = ends[1];
    return true;
  }
  void close_read() { close_one(&read_end); }
  void close_write() { close_one(&write_end); }
  void close_both() {
    close_read();
    close_write();
  }

 private:
  static void close_one(int* fd) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
};

std::string_view name_of(std::string_view variable) {
  return variable.substr(0, variable.find('='));
}

// This process's environment with some variables set anew.
std::vector<std::string> merged_environment(const std::vector<std::string>& changes) {
  std::vector<std::string> all = changes;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view name = name_of(*entry);
    const bool replaced =
        std::any_of(changes.begin(), changes.end(),
                    [&](const std::string& change) { return name_of(change) == name; });
    if (!replaced) all.emplace_back(*entry);
  }
  return all;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> result;
  for (std::string& word : words) result.push_back(word.data());
  result.push_back(nullptr);
  return result;
}

void default_signals() {
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
}

// Between fork and exec: async-signal-safe calls only.
[[noreturn]] void become_rank(char* const* words, char* const* environment, pid_t parent, int in,
                              int out, int err, int report) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // it died before the line above took effect
  default_signals();
  if (in < 0) in = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (in >= 0) dup2(in, STDIN_FILENO);
  if (out >= 0) dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  execvpe(words[0], words, environment);
  const int reason = errno;
  [[maybe_unused]] const auto written = write(report, &reason, sizeof reason);
  _exit(127);
}

// Groups are announced as their number, and taken back as its negative.
[[noreturn]] void watch(int pipe) {
  setpgid(0, 0);
  for (const int ignored : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGUSR1, SIGUSR2})
    signal(ignored, SIG_IGN);
  const int nothing = open("/dev/null", O_RDWR);
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(nothing, fd);
  dup2(pipe, STDERR_FILENO + 1);
  close_range(STDERR_FILENO + 2, ~0u, 0);

  std::vector<pid_t> groups;
  int32_t message = 0;
  ssize_t n = 0;
  while ((n = read(STDERR_FILENO + 1, &message, sizeof message)) != 0) {
    if (n < 0 && errno != EINTR) break;
    if (n != static_cast<ssize_t>(sizeof message)) continue;
    if (message > 0) {
      groups.push_back(message);
    } else {
      groups.erase(std::remove(groups.begin(), groups.end(), -message), groups.end());
    }
  }
  for (const pid_t group : groups) kill(-group, SIGKILL);
  _exit(0);
}

}  // namespace

StartedRank start_rank(const RankCommand& command) {
  StartedRank rank;
  Pipe out, err, report;
  if ((!command.inherit_stdout && !out.open()) || !err.open() || !report.open()) {
    rank.error = errno;
  } else {
    std::vector<std::string> words = command.words;
    std::vector<std::string> environment = merged_environment(command.environment);
    const std::vector<char*> argv = pointers(words), envp = pointers(environment);
    const pid_t self = getpid();
    rank.pid = fork();
    if (rank.pid == 0)
      become_rank(argv.data(), envp.data(), self, command.stdin_fd, out.write_end, err.write_end,
                  report.write_end);
    if (rank.pid < 0) rank.error = errno;
  }
  report.close_write();
  if (rank.pid > 0) {
    setpgid(rank.pid, rank.pid);  // in parent and child: either may be first
    int reason = 0;
    ssize_t n = 0;
    while ((n = read(report.read_end, &reason, sizeof reason)) < 0 && errno == EINTR) {
    }
    if (n == static_cast<ssize_t>(sizeof reason)) {
      rank.error = reason;
      waitpid(rank.pid, nullptr, 0);
    }
  }
  out.close_write();
  err.close_write();
  report.close_both();
  if (rank.error != 0) {
    out.close_both();
    err.close_both();
    rank.pid = -1;
    return rank;
  }
  rank.stdout_fd = out.read_end;
  rank.stderr_fd = err.read_end;
  return rank;
}

std::string how_it_ended(int wait_status) {
  if (WIFEXITED(wait_status)) return fmt::format("exit code {}", WEXITSTATUS(wait_status));
  const int number = WTERMSIG(wait_status);
  return fmt::format("signal {} ({})", number, strsignal(number));
}

bool Watcher::start() {
  Pipe pipe;
  if (!pipe.open()) return false;
  pid_ = fork();
  if (pid_ == 0) {
    pipe.close_write();
    watch(pipe.read_end);
  }
  pipe.close_read();
  if (pid_ < 0) {
    pipe.close_both();
    return false;
  }
  pipe_ = pipe.write_end;
  return true;
}

void Watcher::tell(int32_t message) {
  if (pipe_ >= 0) [[maybe_unused]]
    const auto written = write(pipe_, &message, sizeof message);
}

void Watcher::stop() {
  if (pipe_ >= 0) close(pipe_);
  pipe_ = -1;
  if (pid_ > 0) waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

}  // namespace sotto_cli
