// The time line that SOTTO_TRACE asks for.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "core/codec/codec.h"
#include "core/optim/optimizer.h"
#include "tests/support/core_ranks.h"
#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

using Json = nlohmann::json;

class TraceFiles : public ::testing::TestWithParam<std::string> {
 protected:
  std::string prefix() const { return directory_.path() + "/job"; }
  Json read(int32_t rank) const {
    std::ifstream file(fmt::format("{}.rank{}.json", prefix(), rank));
    return Json::parse(file, nullptr, false);
  }
  // Of the rank: files of several ranks that are opened together have the same numbers.
  static uint64_t operation_of(const Json& event) {
    return std::stoull(event["id2"]["local"].get<std::string>(), nullptr, 16);
  }
  TempDir directory_;
};

// Every message and kernel of a rank is there once; what one peer sends or receives never overlaps;
// nothing lies outside of its operation.
TEST_P(TraceFiles, ShowEveryStep) {
  constexpr uint64_t kElements = 300001;
  WorldOptions world = world_of(GetParam(), 3);
  world.params.trace = prefix();
  std::map<int32_t, TransferCounters> moved;
  std::mutex mutex;
  const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
    std::vector<float> x(kElements, 1.0f);
    SOTTO_ASSIGN(const auto codec,
                 Codec::create(comm, R"({"type": "onebit"})", {kElements}, {Dtype::kF32}));
    for (int i = 0; i < 2; ++i)
      SOTTO_TRY(comm->finish(codec->all_reduce({x.data()}, {x.data()}, {})));
    comm->engine().trace_span("backward \"3\"\n", 5'000, 9'500);
    std::lock_guard lock(mutex);
    moved[comm->rank()] = comm->counters().moved;
    return ok_status();
  });
  ASSERT_TRUE(status.ok()) << status.text();
  for (int32_t rank = 0; rank < 3; ++rank) {
    const Json events = read(rank);
    ASSERT_TRUE(events.is_array()) << rank;
    std::map<std::string, uint64_t> count;
    std::map<int, double> row_end;
    std::map<uint64_t, std::pair<double, double>> operations;
    uint64_t sent = 0;
    std::map<std::string, uint64_t> elements;               // of a kernel
    std::map<std::pair<std::string, int>, uint64_t> bytes;  // of a kind of message and a phase
    for (const Json& e : events) {
      if (e["ph"] == "b") operations[operation_of(e)].first = e["ts"];
      if (e["ph"] == "e") operations[operation_of(e)].second = e["ts"];
    }
    uint64_t spans = 0;
    for (const Json& e : events) {
      if (e["ph"] != "X") continue;
      EXPECT_EQ(e["pid"], rank);
      if (e.value("cat", "") == "trainer") {
        ++spans;
        EXPECT_EQ(e["name"], "backward \"3\"\\x0a");
        EXPECT_EQ(e["ts"], 5.0);
        EXPECT_EQ(e["dur"], 4.5);
        continue;
      }
      const std::string name = e["name"];
      ++count[name];
      const double begin = e["ts"], end = begin + e["dur"].get<double>();
      const auto operation = operations.find(e["args"]["operation"]);
      ASSERT_NE(operation, operations.end());
      EXPECT_GE(begin, operation->second.first);
      EXPECT_LE(end, operation->second.second + 0.002);
      elements[name] += e["args"].value("elements", uint64_t{0});
      if (name != "send" && name != "recv") continue;
      bytes[{name, e["args"].value("phase", 0)}] += e["args"].value("bytes", uint64_t{0});
      EXPECT_GE(begin, row_end[e["tid"]] - 0.002);
      row_end[e["tid"]] = end;
      if (name == "send") sent += e["args"].value("bytes", uint64_t{0});
    }
    EXPECT_EQ(operations.size(), 2u);
    EXPECT_EQ(spans, 1u);
    EXPECT_GT(count["onebit_encode"], 0u);
    EXPECT_GT(count["onebit_server"], 0u);
    EXPECT_GT(count["onebit_decode"], 0u);
    EXPECT_EQ(count["send"], moved[rank].messages_sent);
    EXPECT_EQ(count["recv"], moved[rank].messages_received);
    EXPECT_GE(sent, moved[rank].payload_bytes_sent);
    // 3 chunks of `chunk` elements: 2 of them are sent to their owners and 2 results received.
    const uint64_t chunk = (kElements + 3 * 512 - 1) / (3 * 512) * 512;
    EXPECT_EQ(elements["onebit_encode"], 2 * 3 * chunk);
    EXPECT_EQ(elements["onebit_server"], 2 * chunk);
    for (const int phase : {1, 2}) {
      for (const char* message : {"send", "recv"})
        EXPECT_EQ((bytes[{message, phase}]), 2 * 2 * chunk / 8) << message << phase;
    }
    EXPECT_LE(sent, moved[rank].payload_bytes_sent + moved[rank].header_bytes_sent);
  }
}
// What a rank does alone is an operation, too: all kernels belong to one.
TEST_P(TraceFiles, ShowOperationsWithoutMessages) {
  WorldOptions world = world_of(GetParam(), 2);
  world.params.trace = prefix();
  const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
    std::vector<float> x(5000, 1.0f), g(5000, 1.0f);
    SOTTO_ASSIGN(const auto optimizer,
                 Optimizer::create(comm, R"({"optimizer": {"type": "Adam"}})",
                                   {{"x", 5000, 0, x.data(), g.data(), nullptr}}));
    SOTTO_ASSIGN(const OpRef op, optimizer->accumulate({}));
    return comm->engine().wait(op, -1);
  });
  ASSERT_TRUE(status.ok()) << status.text();
  const Json events = read(0);
  std::map<std::string, std::set<uint64_t>> operations;  // by phase of the event
  uint64_t alone = 0;
  for (const Json& e : events) {
    if (e["ph"] == "X") operations["X"].insert(e["args"]["operation"].get<uint64_t>());
    if (e["ph"] != "b" && e["ph"] != "e") continue;
    operations[e["ph"]].insert(operation_of(e));
    alone += e["name"] == "without messages";
  }
  EXPECT_EQ(alone, 2u);
  EXPECT_EQ(operations["b"], operations["e"]);
  EXPECT_TRUE(std::ranges::includes(operations["b"], operations["X"]));
}

INSTANTIATE_TEST_SUITE_P(Worlds, TraceFiles, ::testing::Values("tcp", "async", "ordered"),
                         [](const auto& p) { return p.param; });

}  // namespace
}  // namespace sotto::test
