// Ranks of which some are threads of one process: each pair is linked by the transport that suits
// it, and all fail together, whoever is lost.
#include <gtest/gtest.h>
#include <signal.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "core/cpu/cpu_device.h"
#include "tests/support/calls.h"
#include "tests/support/core_ranks.h"
#include "tests/support/kill_campaign.h"
#include "tests/support/processes.h"
#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

constexpr int kThreads = 2;  // ranks of each process
constexpr uint64_t kElements = 100'000;

std::shared_ptr<Context> make_context(const std::string& transport) {
  ContextOptions options;
  options.params.transport = transport;
  options.params.heartbeat_ms = 100;
  options.environment = process_environment();
  options.device = std::make_shared<CpuDevice>(1, SimdLevel::kAuto);
  options.backends = standard_backends();
  return std::make_shared<Context>(std::move(options));
}

// One rank: a sum that only the right ranks make, then what the parent waits for.
std::string run_rank(const std::shared_ptr<Context>& context, const UniqueId& id, int32_t rank,
                     int32_t size, bool until_failure, const std::function<void()>& working) {
  CommConfig config;
  config.rank = rank;
  config.size = size;
  config.id = id;
  config.timeout_us = kSanitized ? 120'000'000 : 30'000'000;
  Result<std::shared_ptr<Comm>> comm = Comm::create(context, config);
  if (!comm.ok()) return "create: " + comm.status().text();
  std::vector<float> data(kElements, static_cast<float>(1 << rank));
  if (const Status summed = all_reduce(*comm, data); !summed.ok()) return "sum: " + summed.text();
  if (data != std::vector<float>(kElements, static_cast<float>((1 << size) - 1)))
    return "the sum is wrong";
  std::string routes = fmt::format("{} {}", rank, (*comm)->transport());
  const auto report = nlohmann::json::parse((*comm)->report_json("all"));
  for (const auto& peer : report["peers"]) {
    const std::string route = peer["route"];
    routes += fmt::format(" {}:{}", int32_t{peer["rank"]}, route.substr(0, route.find(' ')));
  }
  if (!until_failure) return routes;
  working();
  Status status;
  while (status.ok()) {
    std::fill(data.begin(), data.end(), 1.0f);
    status = all_reduce(*comm, data);
  }
  return fmt::format("{}: {}", code_name(status.code()), status.text());
}

// argument: path of the id, the transport of each process, and what to do.
SOTTO_RANK_MAIN(links_fault) {
  const auto task = nlohmann::json::parse(self.argument);
  const std::string path = task["id"];
  UniqueId id{};
  std::vector<std::shared_ptr<Context>> contexts;
  for (int t = 0; t < kThreads; ++t)
    contexts.push_back(make_context(task["transports"][static_cast<size_t>(self.rank)]));
  if (self.rank == 0) {
    id = check(contexts[0]->make_unique_id());
    publish(path, id.data(), id.size());
  } else if (!await_published(path, id.data(), id.size(), 60'000)) {
    return 1;
  }
  std::string said[kThreads];
  std::atomic<int> at_work{0};
  const auto working = [&] {
    if (++at_work == kThreads) self.at("working");
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      said[t] = run_rank(contexts[static_cast<size_t>(t)], id, self.rank + self.size * t,
                         self.size * kThreads, task["until_failure"], working);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& text : said) self.say(text);
  return 0;
}

std::string task_of(const std::string& id, std::vector<std::string> transports,
                    bool until_failure) {
  return nlohmann::json{{"id", id}, {"transports", transports}, {"until_failure", until_failure}}
      .dump();
}

// Ranks 0 and 2 are one process, 1 and 3 another.
TEST(Links, EachPairGoesByTheTransportThatSuitsIt) {
  const TempDir folder;
  Processes ranks("links_fault", 2,
                  {.argument = task_of(folder.path() + "/id", {"auto", "auto"}, false)});
  EXPECT_EQ(ranks.message(0), "0 auto 1:shm 2:inproc 3:shm");
  EXPECT_EQ(ranks.message(0), "2 auto 0:inproc 1:shm 3:shm");
  EXPECT_EQ(ranks.message(1), "1 auto 0:shm 2:shm 3:inproc");
  EXPECT_EQ(ranks.message(1), "3 auto 0:shm 1:inproc 2:shm");
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

// A rank that was told to use sockets does.
TEST(Links, RanksThatAskForSocketsHaveThem) {
  const TempDir folder;
  Processes ranks("links_fault", 2,
                  {.argument = task_of(folder.path() + "/id", {"auto", "tcp"}, false)});
  EXPECT_EQ(ranks.message(0), "0 auto 1:tcp 2:inproc 3:tcp");
  EXPECT_EQ(ranks.message(0), "2 auto 0:inproc 1:tcp 3:tcp");
  EXPECT_EQ(ranks.message(1), "1 tcp 0:tcp 2:tcp 3:tcp");
  EXPECT_EQ(ranks.message(1), "3 tcp 0:tcp 1:tcp 2:tcp");
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

// It keeps nobody else from memory: ranks 0 and 3 are one process, 1 and 4, 2 and 5.
TEST(Links, OthersShareMemoryBesideARankThatAsksForSockets) {
  const TempDir folder;
  Processes ranks("links_fault", 3,
                  {.argument = task_of(folder.path() + "/id", {"auto", "tcp", "auto"}, false)});
  EXPECT_EQ(ranks.message(0), "0 auto 1:tcp 2:shm 3:inproc 4:tcp 5:shm");
  EXPECT_EQ(ranks.message(0), "3 auto 0:inproc 1:tcp 2:shm 4:tcp 5:shm");
  EXPECT_EQ(ranks.message(1), "1 tcp 0:tcp 2:tcp 3:tcp 4:tcp 5:tcp");
  EXPECT_EQ(ranks.message(1), "4 tcp 0:tcp 1:tcp 2:tcp 3:tcp 5:tcp");
  EXPECT_EQ(ranks.message(2), "2 auto 0:shm 1:tcp 3:shm 4:tcp 5:inproc");
  EXPECT_EQ(ranks.message(2), "5 auto 0:shm 1:tcp 2:inproc 3:shm 4:tcp");
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

TEST(LinksFault, RanksOfALivingProcessFailTogetherWithTheLostOnes) {
  for (const int lost : {0, 1}) {
    const TempDir folder;
    Processes ranks("links_fault", 2,
                    {.argument = task_of(folder.path() + "/id", {"auto", "auto"}, true)});
    ranks.await(0, "working");
    ranks.await(1, "working");
    ranks.kill(lost, SIGKILL);
    const std::string first = ranks.message(1 - lost), second = ranks.message(1 - lost);
    EXPECT_EQ(first, second);
    EXPECT_TRUE(first.starts_with("PEER_LOST: ")) << first;
    const bool named = first.find(fmt::format("rank {}", lost)) != std::string::npos ||
                       first.find(fmt::format("rank {}", lost + 2)) != std::string::npos;
    EXPECT_TRUE(named) << first;
    ranks.wait_all();
    EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  }
}

}  // namespace
}  // namespace sotto::test
