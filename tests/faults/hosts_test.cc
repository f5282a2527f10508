// Ranks as processes know which of them share a host, and collectives have levels by it.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/cpu/cpu_device.h"
#include "tests/support/calls.h"
#include "tests/support/core_ranks.h"
#include "tests/support/kill_campaign.h"
#include "tests/support/processes.h"
#include "tests/support/temp_dir.h"
#include "tests/support/ucx.h"

namespace sotto::test {
namespace {

std::string text_of(const Comm& comm) {
  std::string text;
  for (const int32_t host : comm.hosts()) text += fmt::format("{} ", host);
  const auto report = nlohmann::json::parse(comm.report_json("routes"));
  text += fmt::format("report {}:", report["host"].get<int32_t>());
  for (const auto& peer : report["peers"]) text += fmt::format(" {}", peer["host"].get<int32_t>());
  return text;
}

// argument: path of the id, SOTTO_HOST_ID of each rank, SOTTO_HIERARCHY, SOTTO_TRANSPORT. A bad
// variable is said.
std::shared_ptr<Comm> create(const ProcessRank& self) {
  const auto task = nlohmann::json::parse(self.argument);
  const std::string path = task["id"], hierarchy = task["hierarchy"];
  const std::string host_id = task["hosts"][static_cast<size_t>(self.rank)];
  if (!host_id.empty()) ::setenv("SOTTO_HOST_ID", host_id.c_str(), 1);
  ::setenv("SOTTO_HIERARCHY", hierarchy.c_str(), 1);
  ::setenv("SOTTO_TRANSPORT", task["transport"].get<std::string>().c_str(), 1);
  ContextOptions options;
  options.environment = process_environment();
  ParamReader reader(options.environment);
  options.params = reader.read<Params>();
  options.backends = standard_backends(reader.read<tcp::Params>());
  if (!reader.status().ok()) {
    self.say(reader.status().text());
    return nullptr;
  }
  options.device = std::make_shared<CpuDevice>(1, SimdLevel::kAuto);
  const auto context = std::make_shared<Context>(std::move(options));
  CommConfig config;
  config.rank = self.rank;
  config.size = self.size;
  UniqueId id{};
  if (self.rank == 0) {
    id = check(context->make_unique_id());
    publish(path, id.data(), id.size());
  } else if (!await_published(path, id.data(), id.size(), 60'000)) {
    return nullptr;
  }
  config.id = id;
  return check(Comm::create(context, config));
}

SOTTO_RANK_MAIN(hosts) {
  const std::shared_ptr<Comm> comm = create(self);
  if (comm == nullptr) return 0;
  self.say(text_of(*comm));
  // The other way round, without rank 0.
  const std::shared_ptr<Comm> part = check(comm->split(self.rank == 0 ? -1 : 0, -self.rank));
  self.say(part == nullptr ? "none" : text_of(*part));
  check(comm->barrier());
  return 0;
}

// An all-reduce, and what it has sent to each peer, by which transport.
SOTTO_RANK_MAIN(levels) {
  const std::shared_ptr<Comm> comm = create(self);
  if (comm == nullptr) return 1;
  std::vector<float> data(64'000, static_cast<float>(1 << self.rank));
  check(all_reduce(comm, data));
  const auto all = static_cast<float>((1 << self.size) - 1);
  std::string text = data == std::vector<float>(data.size(), all) ? "right" : "wrong";
  const auto routes = nlohmann::json::parse(comm->report_json("routes"));
  const auto counters = nlohmann::json::parse(comm->report_json("counters"));
  text += " " + routes["hierarchy"].get<std::string>();
  for (size_t i = 0; i < routes["peers"].size(); ++i) {
    text +=
        fmt::format(", {} {} bytes", routes["peers"][i]["route"].get<std::string>().substr(0, 3),
                    counters["peers"][i]["payload_bytes_sent"].get<uint64_t>());
  }
  self.say(text);
  check(comm->barrier());
  return 0;
}

int64_t sockets() {
  int64_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;  // the directory's own
    count += std::filesystem::read_symlink(entry, closed).string().starts_with("socket:");
  }
  return count;
}

Status all_to_all(const std::shared_ptr<Comm>& comm, std::vector<float>& data) {
  Call call = all_reduce_of(*comm, data);
  call.request.kind = OpKind::kAllToAll;
  call.request.counts = {data.size() / static_cast<size_t>(comm->size())};
  return comm->finish(comm->start(std::move(call), {}));
}

// Sockets of a rank whose pairs are all of TCP: of the new group, after a collective in two levels,
// after one in a single level.
SOTTO_RANK_MAIN(lazy_pairs) {
  const int64_t before = sockets();
  const std::shared_ptr<Comm> comm = create(self);
  if (comm == nullptr) return 1;
  std::string text = fmt::format("{}", sockets() - before);
  int64_t lazy = 0;
  const auto report = nlohmann::json::parse(comm->report_json("routes"));
  for (const auto& peer : report["peers"])
    lazy += peer["route"] == "tcp (connects when it is first used)";
  const int64_t all = sockets() + 2 * lazy;
  std::vector<float> data(6000, static_cast<float>(1 << self.rank));
  check(all_reduce(comm, data));
  text += fmt::format(" {}", sockets() - before);
  self.at("two levels");
  check(all_to_all(comm, data));
  self.at("all to all");
  // The second connection of a pair may come behind the messages.
  for (int i = 0; i < 1000 && sockets() < all; ++i) ::usleep(10'000);
  self.say(text + fmt::format(" {}", sockets() - before));
  self.at("end");
  return 0;
}

// How many of the peers are reached by each transport, and by endpoints that are not made yet.
std::string endpoints_of(const Comm& comm) {
  int shared = 0, made = 0, lazy = 0;
  const auto report = nlohmann::json::parse(comm.report_json("routes"));
  for (const auto& peer : report["peers"]) {
    const std::string route = peer["route"];
    shared += route.starts_with("shm ");
    made += route.starts_with("ucx tcp/");
    lazy += route == "ucx (connects when it is first used)";
  }
  return fmt::format("{} shm, {} made, {} lazy", shared, made, lazy);
}

// As lazy_pairs, over UCX.
SOTTO_RANK_MAIN(lazy_endpoints) {
  const std::shared_ptr<Comm> comm = create(self);
  if (comm == nullptr) return 1;
  self.say(endpoints_of(*comm));
  std::vector<float> data(96'000, static_cast<float>(1 << self.rank));
  const std::shared_ptr<Comm> other = check(comm->split(0, self.rank));
  check(all_reduce(other, data));
  check(comm->barrier());
  self.say(endpoints_of(*comm));
  self.at("two levels");
  check(all_to_all(other, data));
  self.say(endpoints_of(*comm));
  check(comm->barrier());
  return 0;
}

// Ranks are connected with some of the others when one of them goes.
SOTTO_RANK_MAIN(lazy_lost) {
  const std::shared_ptr<Comm> comm = create(self);
  if (comm == nullptr) return 1;
  self.at("connected");
  std::vector<float> data(1'000'000 * static_cast<size_t>(self.size), 1.0f);
  const Status status = all_to_all(comm, data);
  self.say(fmt::format("{}: {}", code_name(status.code()), status.text()));
  return 0;
}

std::string task_of(const TempDir& folder, const std::vector<std::string>& hosts,
                    const std::string& hierarchy = "flat", const std::string& transport = "auto") {
  return nlohmann::json{{"id", folder.path() + "/id"},
                        {"hosts", hosts},
                        {"hierarchy", hierarchy},
                        {"transport", transport}}
      .dump();
}

TEST(Hosts, ProcessesOfOneMachineShareAHost) {
  const TempDir folder;
  Processes ranks("hosts", 2, {.argument = task_of(folder, {"", ""})});
  for (const int rank : {0, 1}) EXPECT_EQ(ranks.message(rank), "0 0 report 0: 0");
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

TEST(Hosts, TheyAreWhatTheRanksSayAndSplitsInheritThem) {
  const TempDir folder;
  Processes ranks("hosts", 4, {.argument = task_of(folder, {"b", "a", "b", ""})});
  EXPECT_EQ(ranks.message(0), "0 1 0 2 report 0: 1 0 2");
  EXPECT_EQ(ranks.message(1), "0 1 0 2 report 1: 0 0 2");
  EXPECT_EQ(ranks.message(2), "0 1 0 2 report 0: 0 1 2");
  EXPECT_EQ(ranks.message(3), "0 1 0 2 report 2: 0 1 0");
  // Ranks 3, 2, 1 of the root comm.
  EXPECT_EQ(ranks.message(0), "none");
  EXPECT_EQ(ranks.message(1), "0 1 2 report 2: 0 1");
  EXPECT_EQ(ranks.message(2), "0 1 2 report 1: 0 2");
  EXPECT_EQ(ranks.message(3), "0 1 2 report 0: 1 2");
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

// Shared memory inside hosts, sockets between them: a rank sends its host mate half of the values
// twice, and half of its shard twice to the rank of the other host that has the same one.
TEST(Hosts, SharedMemoryInsideAndSocketsBetween) {
  const TempDir folder;
  Processes ranks("levels", 4, {.argument = task_of(folder, {"a", "b", "a", "b"}, "sharded")});
  const char* const expected[] = {"tcp 128000 bytes, shm 256000 bytes, tcp 0 bytes",
                                  "tcp 128000 bytes, tcp 0 bytes, shm 256000 bytes",
                                  "shm 256000 bytes, tcp 0 bytes, tcp 128000 bytes",
                                  "tcp 0 bytes, shm 256000 bytes, tcp 128000 bytes"};
  for (int rank = 0; rank < 4; ++rank)
    EXPECT_EQ(ranks.message(rank), std::string("right sharded, ") + expected[rank]);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

// W ranks on hosts of L: a rank is connected with those of its host, those of its number on other
// hosts, and rank 0. Others follow when they are used. Beside them a control connection to rank 0,
// and a listener for lower ranks.
TEST(Hosts, RanksThatExchangeNothingAreNotConnected) {
  for (const std::vector<std::string>& hosts :
       {std::vector<std::string>{"a", "a", "a", "b", "b", "b"}, {"a", "b", "c", "a", "b", "c"}}) {
    const TempDir folder;
    const auto size = static_cast<int64_t>(hosts.size());
    ProcessOptions options{.argument = task_of(folder, hosts, "sharded", "tcp")};
    for (int rank = 0; rank < size; ++rank) {
      for (const char* const point : {"two levels", "all to all", "end"})
        options.stop_at.push_back(fmt::format("{}:{}", rank, point));
    }
    Processes ranks("lazy_pairs", static_cast<int>(size), options);
    const auto all_at = [&](const std::string& point) {
      for (int rank = 0; rank < size; ++rank) ranks.await(rank, point);
      for (int rank = 0; rank < size; ++rank) ranks.go(rank);
    };
    all_at("two levels");
    all_at("all to all");
    for (int64_t rank = 0; rank < size; ++rank) {
      std::vector<int64_t> number_of(hosts.size());
      for (size_t r = 0; r < hosts.size(); ++r)
        number_of[r] =
            std::count(hosts.begin(), hosts.begin() + static_cast<ptrdiff_t>(r), hosts[r]);
      int64_t pairs = 0, lower = 0;
      for (int64_t peer = 0; peer < size; ++peer) {
        const bool linked = rank == 0 || peer == 0 || hosts[peer] == hosts[rank] ||
                            number_of[peer] == number_of[rank];
        pairs += peer != rank && linked;
        lower += peer < rank && !linked;
      }
      const int64_t control = rank == 0 ? size - 1 + 1 : 1;  // and where ranks meet
      const int64_t base = control + (lower > 0 ? 1 : 0);
      const int64_t levels = base + 2 * pairs, flat = base + 2 * (size - 1);
      EXPECT_EQ(ranks.message(static_cast<int>(rank)),
                fmt::format("{} {} {}", levels, levels, flat))
          << rank;
    }
    all_at("end");
    ranks.wait_all();
    EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  }
}

// W ranks on M hosts of L: of UCX a rank has M - 1 endpoints, to those of its number on other
// hosts, and all W - L only when they are used. A comm that is split off has those of its root.
TEST(Hosts, RanksThatExchangeNothingHaveNoEndpoints) {
  if (why_no_ucx() != nullptr) GTEST_SKIP() << why_no_ucx();
  for (const auto& hosts : {std::vector<std::string>{"a", "a", "a", "b", "b", "b"},
                            {"a", "b", "c", "d", "a", "b", "c", "d"}}) {
    const TempDir folder;
    const auto size = static_cast<int>(hosts.size());
    const auto mates = static_cast<int>(std::ranges::count(hosts, "a"));
    ProcessOptions options{.argument = task_of(folder, hosts, "sharded", "ucx")};
    for (int rank = 0; rank < size; ++rank)
      options.stop_at.push_back(fmt::format("{}:two levels", rank));
    Processes ranks("lazy_endpoints", size, options);
    const int made = size / mates - 1;
    const std::string levels =
        fmt::format("{} shm, {} made, {} lazy", mates - 1, made, size - mates - made);
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(ranks.message(rank), levels) << rank;
      EXPECT_EQ(ranks.message(rank), levels) << rank;
    }
    // None goes on before all have looked.
    for (int rank = 0; rank < size; ++rank) ranks.await(rank, "two levels");
    for (int rank = 0; rank < size; ++rank) ranks.go(rank);
    for (int rank = 0; rank < size; ++rank)
      EXPECT_EQ(ranks.message(rank),
                fmt::format("{} shm, {} made, 0 lazy", mates - 1, size - mates))
          << rank;
    ranks.wait_all();
    EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
    EXPECT_EQ(ranks.prefixed_output(), "");
  }
}

// Ranks 1 and 2 have not been connected.
void expect_lost_before_connected(const std::string& transport) {
  for (const int lost : {1, 2}) {
    const TempDir folder;
    ProcessOptions options{.argument = task_of(folder, {"a", "b", "a", "b"}, "flat", transport)};
    for (int rank = 0; rank < 4; ++rank)
      options.stop_at.push_back(fmt::format("{}:connected", rank));
    Processes ranks("lazy_lost", 4, options);
    for (int rank = 0; rank < 4; ++rank) ranks.await(rank, "connected");
    ranks.kill(lost, SIGKILL);
    for (int rank = 0; rank < 4; ++rank) {
      if (rank != lost) ranks.go(rank);
    }
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == lost) continue;
      const std::string text = ranks.message(rank);
      EXPECT_TRUE(text.starts_with(fmt::format("PEER_LOST: rank {} (pid ", lost))) << text;
    }
    ranks.wait_all();
    EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  }
}

TEST(Hosts, ARankThatGoesBeforeItsConnectionsAreMadeIsNamed) {
  expect_lost_before_connected("tcp");
}

TEST(Hosts, ARankThatGoesBeforeItsEndpointsAreMadeIsNamed) {
  if (why_no_ucx() != nullptr) GTEST_SKIP() << why_no_ucx();
  expect_lost_before_connected("ucx");
}

TEST(Hosts, ABadTextIsRefusedWithItsName) {
  const TempDir folder;
  Processes ranks("hosts", 1, {.argument = task_of(folder, {"a\tb"})});
  const std::string text = ranks.message(0);
  EXPECT_NE(text.find("SOTTO_HOST_ID"), std::string::npos) << text;
  EXPECT_NE(text.find("printable ASCII text"), std::string::npos) << text;
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

}  // namespace
}  // namespace sotto::test
