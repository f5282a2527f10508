// Ranks as processes that work until one of them, drawn by a seed, is killed or stopped at a moment
// drawn by the seed. What the ranks do, and through which interface, is the test's own:
//
//   SOTTO_RANK_MAIN(my_ranks) {
//     const KillTask task = KillTask::parse(self);
//     ...;                      // whatever needs no other rank
//     self.at("started");
//     ...;                      // meet the others through task.id_file
//     self.at("working");       // after some operations; then on, until one fails
//     ...;                      // the survivors meet again through task.next_id_file()
//     self.say("PEER_LOST rank 2 ...");  // the first failure: code and text
//     return 0;
//   }
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/processes.h"
#include "tests/support/sanitized.h"

namespace sotto::test {

// Time without progress after which a rank gives up: where only that ends the case, and where
// something else does.
inline constexpr int64_t kStopTimeoutUs = 10'000'000;
inline constexpr int64_t kKillTimeoutUs = 60'000'000;
// For the meeting of the survivors, who end at different times.
inline constexpr int64_t kNextTimeoutUs = 60'000'000;

struct KillCase {
  std::string rank_main;
  std::string what;  // for the ranks: what they work on
  int signal = 0;    // SIGKILL or SIGSTOP
  uint32_t seed = 0;
  int size = 0;                  // 0: 2 to 4, by the seed
  bool while_they_meet = false;  // else: while they work
  std::vector<std::string> environment = {};
};

// One rank's part of a case.
struct KillTask {
  std::string id_file;  // where the rank that makes the unique id leaves it
  std::string what;
  int victim = -1;         // this rank will be killed or stopped; only for use after the failure
  int64_t timeout_us = 0;  // of the comm
  static KillTask parse(const ProcessRank& self);
  std::string argument() const;  // of a process
  // Among the survivors.
  std::string next_id_file() const { return id_file + ".next"; }
  int next_rank(int rank) const { return rank > victim ? rank - 1 : rank; }
};

// Runs cases with gtest's expectations: every survivor ends with PEER_LOST or TIMEOUT that names
// the victim, and with exit status 0. Those that mostly wait run side by side.
void run_kill_cases(const std::vector<KillCase>& cases);

// A file that appears as a whole.
void publish(const std::string& file, const void* bytes, size_t count);
// Waits for it at most timeout_ms. False: it did not come, or has another length.
bool await_published(const std::string& file, void* bytes, size_t count, int64_t timeout_ms);

}  // namespace sotto::test
