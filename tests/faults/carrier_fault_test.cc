// Ranks as processes over shared memory and over UCX: results, routes between hosts that the test
// names, and a rank that is killed or stopped.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/base/hash.h"
#include "tests/support/calls.h"
#include "tests/support/core_ranks.h"
#include "tests/support/kill_campaign.h"
#include "tests/support/process_comm.h"
#include "tests/support/processes.h"
#include "tests/support/temp_dir.h"
#include "tests/support/ucx.h"

namespace sotto::test {
namespace {

constexpr size_t kElements = 300'001;

// Numbers whose sum depends on the order of its terms.
std::vector<float> numbers_of(int rank) {
  std::vector<float> numbers(kElements);
  uint32_t state = static_cast<uint32_t>(rank) + 1;
  for (float& number : numbers) {
    state = state * 1664525u + 1013904223u;
    number = static_cast<float>(state >> 8) * 1e-5f;
  }
  return numbers;
}

std::string routes_of(const Comm& comm) {
  std::string text = std::string(comm.transport());
  const auto report = nlohmann::json::parse(comm.report_json("routes"));
  for (const auto& peer : report["peers"]) {
    const std::string route = peer["route"];
    text += fmt::format(" {}:{}", int32_t{peer["rank"]}, route.substr(0, route.find(' ')));
  }
  return text;
}

std::shared_ptr<Comm> meet(const ProcessRank& self, const nlohmann::json& task) {
  Params params;
  params.transport = task["transport"];
  params.host_id = task["hosts"][static_cast<size_t>(self.rank)];
  params.heartbeat_ms = 100;
  params.silence_limit_ms = task["silence_limit_ms"];
  return check(create_by_file(self, params, kSanitized ? 120'000'000 : 60'000'000, task["id"]));
}

SOTTO_RANK_MAIN(carrier_fault) {
  const auto task = nlohmann::json::parse(self.argument);
  const std::shared_ptr<Comm> comm = meet(self, task);
  std::vector<float> data = numbers_of(self.rank);
  check(all_reduce(comm, data));
  self.say(fmt::format("{:016x}", hash64(data.data(), data.size() * sizeof(float))));
  self.say(routes_of(*comm));
  if (!task["until_failure"]) {
    check(comm->barrier());
    return 0;
  }
  self.at("working");
  Status status;
  while (status.ok()) {
    std::fill(data.begin(), data.end(), 1.0f);
    status = all_reduce(comm, data);
  }
  self.say(fmt::format("{}: {}", code_name(status.code()), status.text()));
  return 0;
}

struct Task {
  std::string transport = "shm";
  std::vector<std::string> hosts;
  bool until_failure = false;
  int silence_limit_ms = 0;
  std::string text(const TempDir& folder) const {
    return nlohmann::json{{"id", folder.path() + "/id"},
                          {"transport", transport},
                          {"hosts", hosts},
                          {"until_failure", until_failure},
                          {"silence_limit_ms", silence_limit_ms}}
        .dump();
  }
};

// Two hosts of two ranks each: shared memory inside them, `between` between them, and the bits of
// TCP.
void expect_routes_of_hosts(const std::string& named, const std::string& between) {
  const Task task{.transport = named, .hosts = {"a", "a", "b", "b"}};
  const TempDir folder, other;
  Processes ranks("carrier_fault", 4, {.argument = task.text(folder)});
  Processes sockets("carrier_fault", 4,
                    {.argument = Task{.transport = "tcp", .hosts = task.hosts}.text(other)});
  for (const int rank : {0, 1, 2, 3}) EXPECT_EQ(ranks.message(rank), sockets.message(rank));
  EXPECT_EQ(ranks.message(0), fmt::format("{0} 1:shm 2:{1} 3:{1}", named, between));
  EXPECT_EQ(ranks.message(1), fmt::format("{0} 0:shm 2:{1} 3:{1}", named, between));
  EXPECT_EQ(ranks.message(2), fmt::format("{0} 0:{1} 1:{1} 3:shm", named, between));
  EXPECT_EQ(ranks.message(3), fmt::format("{0} 0:{1} 1:{1} 2:shm", named, between));
  EXPECT_EQ(sockets.message(0), "tcp 1:tcp 2:tcp 3:tcp");
  ranks.wait_all();
  sockets.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  EXPECT_EQ(ranks.prefixed_output(), "");
}

TEST(Shm, InsideAHostSharedMemoryBetweenHostsTcpAndTheBitsOfTcp) {
  expect_routes_of_hosts("shm", "tcp");
}

TEST(Ucx, InsideAHostSharedMemoryBetweenHostsUcxAndTheBitsOfTcp) {
  if (why_no_ucx() != nullptr) GTEST_SKIP() << why_no_ucx();
  expect_routes_of_hosts("ucx", "ucx");
}

TEST(Ucx, HasTheBitsOfTcp) {
  if (why_no_ucx() != nullptr) GTEST_SKIP() << why_no_ucx();
  const Task task{.transport = "ucx", .hosts = {"a", "b", "c"}};
  const TempDir folder, other;
  Processes ranks("carrier_fault", 3, {.argument = task.text(folder)});
  Processes sockets("carrier_fault", 3,
                    {.argument = Task{.transport = "tcp", .hosts = task.hosts}.text(other)});
  for (const int rank : {0, 1, 2}) EXPECT_EQ(ranks.message(rank), sockets.message(rank));
  EXPECT_EQ(ranks.message(0), "ucx 1:ucx 2:ucx");
  ranks.wait_all();
  sockets.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  EXPECT_EQ(ranks.prefixed_output(), "");
}

// A transport that UCX does not use where the end of a peer has to be seen.
SOTTO_RANK_MAIN(carrier_unreachable) {
  ::setenv("UCX_TLS", "posix", 1);
  Params params;
  params.transport = "ucx";
  params.host_id = fmt::format("host {}", self.rank);
  const auto comm = create_by_file(self, params, 60'000'000, self.argument);
  self.say(fmt::format("{}: {}", code_name(comm.status().code()), comm.status().text()));
  return 0;
}

TEST(Ucx, NamesARankThatItDoesNotReach) {
  if (why_no_ucx() != nullptr) GTEST_SKIP() << why_no_ucx();
  const TempDir folder;
  Processes ranks("carrier_unreachable", 2, {.argument = folder.path() + "/id"});
  for (const int rank : {0, 1}) {
    EXPECT_EQ(ranks.message(rank),
              "TRANSPORT: rank 0 has no way to rank 1: ucp_ep_create (UCX_TLS is posix): "
              "Destination is unreachable (-6)");
  }
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

class CarrierFault : public testing::TestWithParam<const char*> {
 protected:
  // Shared memory is of one host, and UCX of several.
  static std::vector<std::string> hosts() {
    if (GetParam() == std::string("shm")) return {"", "", ""};
    return {"a", "b", "c"};
  }
  void SetUp() override {
    if (GetParam() == std::string("ucx") && why_no_ucx() != nullptr) GTEST_SKIP() << why_no_ucx();
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, CarrierFault, testing::Values("shm", "ucx"),
                         [](const auto& which) { return std::string(which.param); });

// The coordinator, and another rank.
TEST_P(CarrierFault, SurvivorsOfAKilledRankNameIt) {
  for (const int lost : {0, 2}) {
    const TempDir folder;
    Processes ranks(
        "carrier_fault", 3,
        {.argument =
             Task{.transport = GetParam(), .hosts = hosts(), .until_failure = true}.text(folder)});
    for (const int rank : {0, 1, 2}) ranks.await(rank, "working");
    ranks.kill(lost, SIGKILL);
    for (const int rank : {0, 1, 2}) {
      if (rank == lost) continue;
      ranks.message(rank);
      ranks.message(rank);
      const std::string text = ranks.message(rank);
      EXPECT_TRUE(text.starts_with("PEER_LOST: ")) << text;
      EXPECT_NE(text.find(fmt::format("rank {}", lost)), std::string::npos) << text;
    }
    ranks.wait_all();
    EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  }
}

TEST_P(CarrierFault, AStoppedRankIsFoundByItsSilence) {
  const TempDir folder;
  const Task task{
      .transport = GetParam(), .hosts = hosts(), .until_failure = true, .silence_limit_ms = 1000};
  Processes ranks("carrier_fault", 3, {.argument = task.text(folder)});
  for (const int rank : {0, 1, 2}) ranks.await(rank, "working");
  ranks.kill(1, SIGSTOP);
  for (const int rank : {0, 2}) {
    ranks.message(rank);
    ranks.message(rank);
    const std::string text = ranks.message(rank);
    EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
    EXPECT_FALSE(text.starts_with("OK")) << text;
  }
  ranks.kill(1, SIGKILL);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

}  // namespace
}  // namespace sotto::test
