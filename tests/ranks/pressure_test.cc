// A rank that stops reading, reads slowly, or does not ask for what it is sent, makes no rank's
// memory grow beyond a bound that does not depend on how many bytes wait:
//   sender    payloads stay where the caller has them; an operation in flight costs its bookkeeping
//             (plan instance, transfers, flow: at most kPerOperation) and its own scratch (a small
//             all-reduce: the parts of all ranks), both of which later operations use again
//   receiver  credit_bytes (1 MiB) per peer for messages without a posted receive, and a flow
//             of at most kPerOperation for each of their operations
// What the kernel holds in sockets is bounded by its own limits and is no memory of the process.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "tests/ranks/capi_support.h"
#include "tests/support/processes.h"
#include "tests/support/reserved_port.h"
#include "tests/support/sanitized.h"

namespace sotto::test {
namespace {

constexpr int kOperations = 1000;         // in flight at once
constexpr int64_t kElements = 15 * 1024;  // 60 KiB a message: sent within the credit
constexpr int64_t kSentBytes = kOperations * kElements * 4;
constexpr int64_t kCredit = 1 << 20;
constexpr int64_t kPerOperation = 8192;
// What the allocator takes from the system at once, and what a first operation makes once.
constexpr int64_t kOnce = 4 << 20;
constexpr int64_t kBound = kCredit + kOperations * kPerOperation + kOnce;
static_assert(4 * kBound < kSentBytes, "the bound shows nothing");
constexpr int64_t kScratch = 2 * kSentBytes;  // of all-reduces: the parts of two ranks

// Bytes of this process that are in memory and belong to no file.
int64_t resident_bytes() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("RssAnon:")) return 1024 * std::stoll(line.substr(8));
  }
  throw RankError("/proc/self/status has no RssAnon");
}

struct World {
  sotto_context* context = new_context();
  sotto_comm* comm = nullptr;
  World() {
    sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
    OK(sotto_comm_create(context, &config, &comm));
  }
  void end() const {
    OK(sotto_barrier(comm, nullptr, nullptr));
    OK(sotto_comm_destroy(comm));
    OK(sotto_context_destroy(context));
  }
};

using Start = std::function<sotto_status(sotto_op** out)>;

std::vector<sotto_op*> start_all(const Start& start) {
  std::vector<sotto_op*> ops(kOperations);
  for (sotto_op*& op : ops) OK(start(&op));
  return ops;
}
void wait_all(const std::vector<sotto_op*>& ops) {
  for (sotto_op* op : ops) {
    OK(sotto_op_wait(op, -1));
    OK(sotto_op_release(op));
  }
}

// The bound holds at any moment, most of all when everything has been sent that can be. Operations
// may end meanwhile if the other rank reads.
int64_t most_while_in_flight(sotto_op* last, int64_t before, bool may_end) {
  int64_t most = 0;
  sotto_status status = SOTTO_IN_PROGRESS;
  for (int look = 0; look < 30 && status == SOTTO_IN_PROGRESS; ++look) {
    status = sotto_op_wait(last, 10'000);
    most = std::max(most, resident_bytes() - before);
  }
  require(status == (may_end ? SOTTO_OK : SOTTO_IN_PROGRESS) || status == SOTTO_IN_PROGRESS,
          fmt::format("the last operation has ended: {}, {}", static_cast<int>(status),
                      sotto_last_error()));
  return most;
}

// Rank 0 starts everything while the other one is stopped, reads slowly or asks for nothing. Two
// rounds: what the first one has made the second one uses again.
SOTTO_RANK_MAIN(pressure) {
  ::setenv("SOTTO_RANK", std::to_string(self.rank).c_str(), 1);
  const World world;
  // All operations read the same memory, and write the same values to the same memory.
  std::vector<float> data(kElements, 1.0f), result(kElements);
  const sotto_buffer in = buffer(data), out = buffer(result);
  const Start start = [&](sotto_op** op) {
    if (self.argument.starts_with("all_reduce"))
      return sotto_all_reduce(world.comm, &in, &out, 1, nullptr, op);
    return self.rank == 0 ? sotto_send(world.comm, &in, 1, 1, nullptr, op)
                          : sotto_recv(world.comm, &out, 1, 0, nullptr, op);
  };
  for (int round = 0; round < 2; ++round) {
    const int64_t before = resident_bytes();
    std::vector<sotto_op*> ops;
    int64_t grown = 0;
    self.at("idle");
    if (self.rank == 0) {
      ops = start_all(start);
      grown = most_while_in_flight(ops.back(), before, self.argument.ends_with(" slow"));
    } else {
      grown = resident_bytes() - before;
    }
    self.say(std::to_string(grown));
    self.at("measured");
    if (self.rank != 0) ops = start_all(start);
    wait_all(ops);
  }
  self.at("done");
  world.end();
  return 0;
}

// Growth of both ranks in both rounds.
struct Growth {
  int64_t sender[2], receiver[2];
};

int64_t bound_of_sender(const std::string& what) {
  return kBound + (what == "all_reduce" ? kScratch : 0);
}

enum class Reader { kStopped, kSlow, kSilent };

// Runs for a moment now and then, while rank 0 looks.
void run_slowly(Processes* ranks, int rank) {
  for (int pause = 0; pause < 10; ++pause) {
    ranks->kill(rank, SIGSTOP);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ranks->kill(rank, SIGCONT);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

Growth measure(const std::string& what, Reader reader) {
  const ReservedPort port;
  ProcessOptions options;
  options.argument = what + (reader == Reader::kSlow ? " slow" : "");
  options.environment = {"SOTTO_TRANSPORT=tcp", "SOTTO_CPU_THREADS=1", "SOTTO_WORLD_SIZE=2",
                         fmt::format("SOTTO_RENDEZVOUS=tcp://127.0.0.1:{}", port.number())};
  options.stop_at = {"0:idle", "1:idle", "1:measured", "1:done"};
  Processes ranks("pressure", 2, options);
  Growth growth{};
  for (int round = 0; round < 2; ++round) {
    ranks.await(0, "idle");
    ranks.await(1, "idle");
    const auto receiver_asks = [&] {
      ranks.go(1);
      growth.receiver[round] = std::stoll(ranks.message(1));
      ranks.go(1);
    };
    if (reader == Reader::kSlow) receiver_asks();
    if (reader == Reader::kStopped) ranks.kill(1, SIGSTOP);
    ranks.go(0);
    if (reader == Reader::kSlow) run_slowly(&ranks, 1);
    growth.sender[round] = std::stoll(ranks.message(0));
    if (reader == Reader::kStopped) ranks.kill(1, SIGCONT);
    if (reader != Reader::kSlow) receiver_asks();
  }
  ranks.await(1, "done");
  ranks.go(1);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  return growth;
}

class Pressure : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (kSanitized) GTEST_SKIP() << "the sanitizer's allocator keeps what is given back";
  }
};

TEST_P(Pressure, ARankThatIsStoppedMakesNobodysMemoryGrow) {
  const Growth g = measure(GetParam(), Reader::kStopped);
  RecordProperty("sender_bytes", std::to_string(g.sender[0]));
  EXPECT_LE(g.sender[0], bound_of_sender(GetParam()));
  EXPECT_LE(g.sender[1], kOnce);
}

TEST_P(Pressure, ARankThatReadsSlowlyMakesNobodysMemoryGrow) {
  const Growth g = measure(GetParam(), Reader::kSlow);
  RecordProperty("sender_bytes", std::to_string(g.sender[0]));
  // How many are in flight at once depends on how slowly it reads, so the second round may add
  // some.
  EXPECT_LE(g.sender[0] + g.sender[1], bound_of_sender(GetParam()));
}

TEST_P(Pressure, WhatNobodyAsksForIsBoundedByTheCredit) {
  const Growth g = measure(GetParam(), Reader::kSilent);
  RecordProperty("sender_bytes", std::to_string(g.sender[0]));
  RecordProperty("receiver_bytes", std::to_string(g.receiver[0]));
  EXPECT_LE(g.sender[0], bound_of_sender(GetParam()));
  EXPECT_LE(g.receiver[0], kBound);
  EXPECT_LE(g.sender[1], kOnce);
  EXPECT_LE(g.receiver[1], kOnce);
}

INSTANTIATE_TEST_SUITE_P(Operations, Pressure, testing::Values("send", "all_reduce"),
                         [](const auto& p) { return std::string(p.param); });

}  // namespace
}  // namespace sotto::test
