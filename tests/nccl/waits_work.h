// What ranks do in a session of waits_test.cc, on streams of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>

#include "tests/nccl/process_rank.h"

namespace sotto::test {

inline constexpr size_t kWorkElements = 9000;
inline constexpr int kMaxRounds = 11;

// What the ranks do in a session, round by round.
struct WorkKind {
  const char* name;
  const char* codec;      // of a compressed mean beside other collectives
  const char* optimizer;  // or of a training
  int rounds;
  // Rounds of one stage have the same plans, and so the same waits.
  int stage[kMaxRounds];
  // Which rank's gradients have a NaN, in what the other rank adds up.
  int nan_of_rank[kMaxRounds];
  const char* native = "exact";  // SOTTO_NCCL_NATIVE
  int least = 5;                 // waits that there are
  const char* outer = nullptr;   // or of outer steps
  // Needed, but not to be seen: lane 1 waits for messages of rank 1 that say something only of
  // values that are not finite, from this record of that stream on. Before it may be records for
  // the caller's stream.
  struct {
    uint32_t stream = 0, awaited = 0;
    uint64_t record = 0;
  } unseen = {};
  // Of gradients that become ready one by one: averages of two, or the steps of `optimizer`.
  const char* overlap = nullptr;
  int withdrawn_by[kMaxRounds] = {};  // 1 + the rank

  sotto_status status(int round) const {
    if (withdrawn_by[round] != 0) return SOTTO_E_CANCELLED;
    return nan_of_rank[round] < 0 ? SOTTO_OK : SOTTO_E_NONFINITE;
  }
};
inline void PrintTo(const WorkKind& kind, std::ostream* out) { *out << kind.name; }

// One rank's part of a session. What it brings on rank 0 is compared.
class Work {
 public:
  virtual ~Work() = default;
  // What it says at once.
  virtual std::string round(int round) = 0;
  // What the caller's stream has found behind each operation, all rounds together.
  virtual std::string seen() = 0;
  // Ends what has been started.
  virtual void end() = 0;
};

// Of the comm's rank. timeout_us: of operations; 0 is the comm's.
std::unique_ptr<Work> make_work(const WorkKind& kind, const ProcessRank& place, sotto_comm* comm,
                                int64_t timeout_us);

}  // namespace sotto::test
