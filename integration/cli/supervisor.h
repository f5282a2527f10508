// A run: n ranks of one program, from their start to the end of the last one.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "integration/cli/hosts.h"
#include "integration/cli/launch.h"
#include "integration/cli/output.h"
#include "integration/cli/ranks.h"
#include "integration/cli/remote_ranks.h"

namespace sotto_cli {

struct RunOptions {
  int32_t ranks = 0;
  std::string rendezvous;            // tcp://host:port; empty: a free port
  std::vector<std::string> wrapper;  // words before the program's
  std::vector<std::string> command;
  std::vector<std::string> environment;   // "NAME=value" for all ranks
  std::vector<Host> hosts;                // empty: this machine
  RemoteShell shell;                      // by which hosts are reached
  double host_timeout_s = kHostTimeoutS;  // how long a host may be silent
  double timeout_s = 0;                   // of the whole run; 0: none
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

class Supervisor final : public RankListener {
 public:
  explicit Supervisor(RunOptions options);
  ~Supervisor() override;

  // Runs everything to its end; returns the exit code of sotto-run.
  int run();

  void on_output(int32_t rank, Stream stream, std::string_view bytes) override;
  void on_end(int32_t rank, int wait_status) override;
  void on_closed(int32_t rank) override;
  void on_start_failed(int32_t rank, int error, const std::string& host) override;
  void on_host_failed(const std::string& text) override;

 private:
  struct Rank {
    bool running = false;
    bool closed = false;
    int wait_status = 0;
    std::unique_ptr<Relay> out, err;  // out: null if the rank has inherited it
  };
  // What sotto-run does to the ranks that are left, ascending.
  enum class RankStage { kRunning, kGrace, kAsked, kKilled };

  void wait_until_ready();
  void start_all();
  void expect_rank(int32_t rank);
  int64_t due_ns() const;
  void wait_for_events();
  void on_signal(int number);
  void stop_as_asked();
  void look_for_failure();
  void on_failure(int32_t rank);
  void escalate_if_due();
  void end_all(int signal_number, std::string_view why, int exit_code);
  void enter_grace(const std::string& why);
  void signal_all(int signal_number);
  void close_runners();
  void finish_output();
  size_t queued() const { return out_.queued() + err_.queued(); }
  bool everything_done() const;
  bool any_running() const;
  std::string running_ranks() const;
  void say(const std::string& text);
  void show_first_failure();

  const RunOptions options_;
  Sink out_{STDOUT_FILENO, "standard output"};
  Sink err_{STDERR_FILENO, "standard error", &out_};
  Watcher watcher_;
  std::vector<std::unique_ptr<RankRunner>> runners_;  // in the order of their ranks
  std::vector<Rank> ranks_;
  std::vector<int32_t> failures_;  // since the last look
  int signal_fd_ = -1;
  bool redraw_ = false;  // the raw rank may have left a line unfinished on our terminal
  bool started_ = false;

  RankStage stage_ = RankStage::kRunning;
  int64_t next_stage_ns_ = 0;  // 0: nothing is due
  int64_t time_limit_ns_ = 0;
  int32_t first_failure_ = -1;
  int exit_code_ = 0;
  std::string ended_because_;  // empty unless a rank is the reason
};

}  // namespace sotto_cli
