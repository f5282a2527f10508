// Starting the processes of a run, and making sure that none survives it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace sotto_cli {

struct RankCommand {
  std::vector<std::string> words;        // program and arguments; the program is looked up in PATH
  std::vector<std::string> environment;  // "NAME=value", on top of this process's own
  bool inherit_stdout = false;           // else a pipe
  int stdin_fd = -1;                     // borrowed; -1: nothing can be read
};

struct StartedRank {
  pid_t pid = -1;      // leader of its own process group
  int stdout_fd = -1;  // read ends; -1 if inherited
  int stderr_fd = -1;
  int error = 0;  // errno of what failed; then nothing runs and no descriptor is open
};

// Starts one rank, or a remote shell, in a process group of its own, to be killed when this process
// dies.
StartedRank start_rank(const RankCommand& command);

// "exit code 3" or "signal 9 (Killed)"; wait_status as of waitpid(2).
std::string how_it_ended(int wait_status);

// A small process that kills the process groups of a run when sotto-run has died without doing so.
// (The kernel's parent-death signal reaches only direct children, not those that a wrapper
// started.)
class Watcher {
 public:
  Watcher() = default;
  ~Watcher() { stop(); }
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  // False if no process can be made.
  bool start();
  void add(pid_t group) { tell(group); }
  // To be called before the leader is reaped: until then its number cannot have been given to
  // another process.
  void forget(pid_t group) { tell(-group); }
  void stop();

 private:
  void tell(int32_t message);

  pid_t pid_ = -1;
  int pipe_ = -1;
};

}  // namespace sotto_cli
