// Ranks of a test as processes: this test binary again, started with --rank-main.
//
//   SOTTO_RANK_MAIN(train) { ...; self.at("before step 3"); ...; return 0; }
//   TEST(Fault, Kill) {
//     Processes ranks("train", 4, {.argument = address, .stop_at = {"2:before step 3"}});
//     ranks.await(2, "before step 3");
//     ranks.kill(2, SIGKILL);
//     ranks.wait_all();
//     EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
//   }
//
// Threads: the thread that made the object; the processes are killed when that thread or the object
// ends.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/ranks.h"

namespace sotto::test {

// What the main function of a rank is given in its own process.
struct ProcessRank {
  int rank = 0;
  int size = 0;
  std::string argument;              // as given to Processes
  std::vector<std::string> stop_at;  // points where this rank waits for the parent

  // Tells the parent that a point has been reached. If the parent asked for a stop there, waits
  // until Processes::go.
  void at(const std::string& point) const;
  // Sends a text of one line to the parent (Processes::message).
  void say(const std::string& text) const;
};
using RankMain = std::function<int(const ProcessRank&)>;

// An exception that leaves the main function is printed, and the process ends with 1.
bool register_rank_main(const std::string& name, RankMain main);
#define SOTTO_RANK_MAIN(name)                                                \
  static int sotto_rank_main_##name(const ::sotto::test::ProcessRank& self); \
  [[maybe_unused]] static const bool sotto_rank_main_registered_##name =     \
      ::sotto::test::register_rank_main(#name, sotto_rank_main_##name);      \
  static int sotto_rank_main_##name([[maybe_unused]] const ::sotto::test::ProcessRank& self)

// For main().
bool is_rank_process(int argc, char** argv);
int run_rank_process(int argc, char** argv);

// How a process ended.
struct Exit {
  int status = -1;      // if it ended by itself
  int signal = 0;       // if a signal ended it
  bool killed = false;  // the test has sent that signal
  bool ok() const { return signal == 0 && status == 0; }
};

struct ProcessOptions {
  std::string argument = {};
  std::vector<std::string> environment = {};            // "NAME=value", besides this process's own
  std::vector<std::string> stop_at = {};                // "rank:point"
  int64_t timeout_ms = kSanitized ? 300'000 : 100'000;  // of everything together
};

class Processes {
 public:
  Processes(const std::string& main_name, int size, const ProcessOptions& options = {});
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  // Waits until the rank has come to the point. These and the next throw RankError, with the output
  // of all ranks, if the rank ended before, or when the time is over.
  void await(int rank, const std::string& point);
  // Lets a rank go on that waits at a point where it was asked to stop.
  void go(int rank);
  // The next text that the rank has said.
  std::string message(int rank);
  const Exit& wait(int rank);
  void wait_all();

  void kill(int rank, int signal);  // SIGKILL, SIGSTOP, SIGCONT, ...
  pid_t pid(int rank) const;
  bool running(int rank);
  const Exit& exit_of(int rank) const;  // after wait

  // After wait_all: "" if every rank ended with 0, else the first one that did not. Those that the
  // test killed do not count.
  std::string failure() const;
  // Standard output and error so far, of one rank; of all, every line with its rank.
  std::string output(int rank) const;
  std::string prefixed_output() const;

 private:
  struct Process;
  void start(const std::string& main_name, int size, int rank, const ProcessOptions& options);
  void pump(int rank, const char* doing);
  void read_lines(Process& p);
  void reap(int rank);
  Process& at(int rank) const;

  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<int> ended_;  // ranks in the order of their ends
  int64_t ends_at_ns_ = 0;
};

}  // namespace sotto::test
