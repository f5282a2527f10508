// A run: n ranks of one program on this machine, from their start to the end of the last one.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "integration/cli/launch.h"
#include "integration/cli/output.h"

namespace sotto_cli {

struct RunOptions {
  int32_t ranks = 0;
  std::string rendezvous;            // tcp://host:port; empty: a free port of 127.0.0.1
  std::vector<std::string> wrapper;  // words before the program's
  std::vector<std::string> command;
  double timeout_s = 0;  // of the whole run; 0: none
  // How long the others may go on after a rank has failed, and any may after a signal.
  double grace_s = 10;
  int32_t raw_rank = -1;  // whose standard output is left alone; -1: none
};

// Exit codes of sotto-run besides those of its ranks; the words of env(1) and timeout(1).
inline constexpr int kExitTimeLimit = 124;
inline constexpr int kExitOwnFailure = 125;
inline constexpr int kExitCannotRun = 126;
inline constexpr int kExitNotFound = 127;
inline constexpr int kExitSignal = 128;  // plus the signal's number

class Supervisor {
 public:
  explicit Supervisor(RunOptions options);
  ~Supervisor();

  // Runs everything to its end; returns the exit code of sotto-run.
  int run();

 private:
  struct Rank {
    pid_t pid = -1;  // -1 when reaped
    int wait_status = 0;
    int64_t ended_ns = 0;
    std::unique_ptr<Relay> out, err;
  };
  // What sotto-run does to the ranks that are left, ascending.
  enum class RankStage { kRunning, kGrace, kAsked, kKilled };

  bool start_all();
  int report_start_failure(int32_t rank, int error);
  std::vector<std::string> environment_of(int32_t rank) const;
  int64_t poll_wait_ms() const;
  void wait_for_events();
  void on_signal(int number);
  void collect_ended();
  void on_failure(int32_t rank);
  void escalate_if_due();
  void end_all(int signal_number, std::string_view why, int exit_code);
  void signal_all(int signal_number);
  void close_leftover_streams();
  bool everything_done() const;
  bool any_running() const;
  std::string running_ranks() const;
  void say(const std::string& text) const;
  void show_first_failure() const;

  const RunOptions options_;
  ReservedPort port_;  // of the rendezvous, where the caller names none
  std::string rendezvous_;
  Watcher watcher_;
  std::vector<Rank> ranks_;
  int signal_fd_ = -1;
  bool redraw_ = false;  // the raw rank may have left a line unfinished on our terminal

  RankStage stage_ = RankStage::kRunning;
  int64_t next_stage_ns_ = 0;  // 0: nothing is due
  int64_t time_limit_ns_ = 0;
  int32_t first_failure_ = -1;
  int exit_code_ = 0;
  std::string ended_because_;  // empty unless sotto-run itself ended the run
};

}  // namespace sotto_cli
