// The ranks of this machine.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

#include "integration/cli/launch.h"
#include "integration/cli/ranks.h"
#include "integration/cli/rendezvous.h"

namespace sotto_cli {

class LocalRanks final : public RankRunner {
 public:
  // inherits_stdout: the rank that gets this process's standard output itself; -1: none. The
  // watcher has been started, and outlives this.
  LocalRanks(RankGroup group, int32_t inherits_stdout, Watcher& watcher);
  ~LocalRanks() override;

  const RankGroup& group() const override { return group_; }
  bool ready() const override { return true; }
  // A free port of 127.0.0.1, which is kept for rank 0.
  std::string rendezvous() override;
  void start(const std::string& rendezvous, RankListener& listener) override;
  void signal_all(int number) override;
  void pause(bool /*stopping*/) override {}

  void hold_output(bool held) override { held_ = held; }
  void watch(std::vector<pollfd>& fds) override;
  int64_t due_ns() const override;
  void handle(const std::vector<pollfd>& fds, RankListener& listener) override;
  void close() override { signal_all(SIGKILL); }
  bool gone() const override { return true; }

  bool all_closed() const;

 private:
  struct Rank {
    pid_t pid = -1;  // -1 when reaped
    int fds[2] = {-1, -1};
    size_t poll_at[2] = {0, 0};  // where watch() put them; 0: nowhere
    int64_t ended_ns = 0;
    bool closed = false;
  };

  std::vector<std::string> environment_of(int32_t rank, const std::string& rendezvous) const;
  // One read at most: the other streams get their turn.
  void read_stream(size_t i, Stream stream, RankListener& listener);
  void close_stream(Rank& rank, Stream stream);
  void collect_ended(RankListener& listener);
  void close_done(RankListener& listener);

  const RankGroup group_;
  const int32_t inherits_stdout_;
  Watcher& watcher_;
  ReservedPort port_;
  std::vector<Rank> ranks_;
  bool held_ = false;
};

}  // namespace sotto_cli
