// A campaign on what the ranks say about a failure. Ranks are processes that use nothing but
// sotto.h: they reduce, or do nothing at all, until one of them is killed, stopped or cut off from
// the network without a word, or one of their connections, control or data, is reset, closed,
// damaged or stalled by a proxy, at a moment drawn by a seed. Then:
//
// - all survivors have the same code and the same text;
// - the accused is the guilty rank; where only a connection is at fault, one of its two ends, and
//   then the text is about the connection;
// - a silence limit is noticed in three times the limit;
// - destroying everything waits for no time-out.
//
// TEST_FAULT_CASES=600 runs about that many cases instead of 68.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "core/iface/unique_id.h"
#include "tests/ranks/capi_support.h"
#include "tests/support/faulty_proxy.h"
#include "tests/support/kill_campaign.h"
#include "tests/support/reserved_port.h"
#include "tests/support/sanitized.h"

namespace sotto::test {
namespace {

using Kind = ProxyFault::Kind;
using nlohmann::json;

// Of operations where a time-out is to be met, and of comms.
constexpr int64_t kShortUs = 10'000'000;
constexpr int64_t kLongUs = 90'000'000;
constexpr int64_t kSilenceMs = 8000;
constexpr int64_t kDestroyMs = kLongUs / 3000;
constexpr int kLanes = 4;

// ---- a rank

std::string text_of(sotto_comm* comm) {
  const char* text = nullptr;
  (void)sotto_comm_error(comm, &text);
  return text;
}

json report_of(sotto_comm* comm) {
  std::string buffer(1 << 16, '\0');
  uint64_t length = 0;
  OK(sotto_comm_report(comm, "all", buffer.data(), buffer.size(), &length));
  return json::parse(buffer.substr(0, length));
}

int64_t now_ms() { return Clock::monotonic().now_ns() / 1'000'000; }

void pause_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

struct Everything {
  sotto_comm* comm = nullptr;
  sotto_comm* half = nullptr;  // a split
  sotto_codec* codec = nullptr;
  sotto_optim* optim = nullptr;
  std::vector<float> weights = std::vector<float>(1000), gradients = std::vector<float>(1000);

  void make() {
    OK(sotto_comm_split(comm, 0, 0, &half));
    sotto_param p = {};
    p.struct_size = sizeof p;
    p.name = "w";
    p.param = buffer(weights);
    p.grad = buffer(gradients);
    OK(sotto_optim_create(
        half, R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.001, "freeze_step": 2}}})",
        &p, 1, &optim));
    const sotto_buffer like = buffer(weights);
    OK(sotto_codec_create(comm, R"({"type": "1bit"})", &like, 1, &codec));
  }
  // How long each took, in milliseconds.
  std::vector<int64_t> destroy() {
    std::vector<int64_t> took;
    const auto timed = [&](const auto& f) {
      const int64_t begin = now_ms();
      f();
      took.push_back(now_ms() - begin);
    };
    timed([&] { (void)sotto_optim_destroy(optim); });
    timed([&] { (void)sotto_codec_destroy(codec); });
    timed([&] { (void)sotto_comm_destroy(half); });
    timed([&] { (void)sotto_comm_destroy(comm); });
    return took;
  }
};

// One operation of the many; the same on all ranks.
sotto_status work(Everything& all, std::vector<float>& data, uint32_t k, int64_t timeout_us) {
  sotto_call call = SOTTO_CALL_INIT;
  call.timeout_us = timeout_us;
  if (k % 5 == 3) return sotto_optim_step(all.optim, &call, nullptr);
  const sotto_buffer whole = buffer(data);
  sotto_buffer some = whole;
  some.count = k % 3 == 0 ? 16 : k % 3 == 1 ? 20'000 : data.size();
  return sotto_all_reduce(k % 2 == 0 ? all.comm : all.half, &some, &some, 1, &call, nullptr);
}

// The host is gone: all packets to this process are dropped unanswered, and it says nothing more.
[[noreturn]] void vanish() {
  sock_filter drop{BPF_RET | BPF_K, 0, 0, 0};
  const sock_fprog program{1, &drop};
  const int never = 0;  // this side's own limit would make the kernel answer with resets
  for (int fd = 3; fd < 1024; ++fd) {
    (void)::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &never, sizeof never);
    (void)::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &never, sizeof never);
    (void)::setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
  }
  for (;;) ::raise(SIGSTOP);
}

SOTTO_RANK_MAIN(cause_fault) {
  const json task = json::parse(self.argument);
  const auto r = static_cast<size_t>(self.rank);
  if (task.contains("listen")) {
    ::setenv("SOTTO_LISTEN_PORT", std::to_string(task["listen"][r].get<int>()).c_str(), 1);
    ::setenv("SOTTO_ADVERTISE", (":" + std::to_string(task["advertise"][r].get<int>())).c_str(), 1);
  }
  if (task["limits_silence"] == self.rank)
    ::setenv("SOTTO_SILENCE_LIMIT_MS", std::to_string(kSilenceMs).c_str(), 1);
  sotto_context* const context = new_context();
  const std::string files = task["files"];
  sotto_unique_id id = {};
  if (self.rank == 0) {
    OK(sotto_unique_id_create(context, &id));
    publish(files + "0", &id, sizeof id);
  } else {
    require(await_published(files + std::to_string(self.rank), &id, sizeof id, 30'000), "no id");
  }
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  config.rank = self.rank;
  config.size = self.size;
  config.id = &id;
  config.timeout_us = kLongUs;
  Everything all;
  OK(sotto_comm_create(context, &config, &all.comm));
  all.make();
  std::vector<float> data(200'000, 0.5f);
  std::mt19937 random(task["seed"].get<uint32_t>() * 64 + static_cast<uint32_t>(self.rank));
  const bool idle = task["idle"];
  for (uint32_t k = 0; sotto_comm_error(all.comm, nullptr) == SOTTO_OK; ++k) {
    if (k == 6) self.at("working");
    if (k == 6 && task["vanishes"] == self.rank) vanish();
    const bool hangs = k >= 6 && task["hangs"] == self.rank;
    if (k >= 6 && (idle || random() % 8 == 0)) pause_ms(static_cast<int64_t>(random() % 15));
    if (k < 6 || !(idle || hangs)) (void)work(all, data, k, task["timeout_us"]);
  }
  const json report = report_of(all.comm);
  json end{{"text", text_of(all.comm)},    {"code", report["status"]},
           {"accused", report["accused"]}, {"reported_by", report["reported_by"]},
           {"failed_at_ms", now_ms()},     {"took_ms", all.destroy()}};
  const int64_t begin = now_ms();
  OK(sotto_context_destroy(context));
  end["took_ms"].push_back(now_ms() - begin);
  self.say(end.dump());
  return 0;
}

// ---- a case

enum class Where : uint8_t { kProcess, kControl, kData };

struct Fault {
  const char* name;
  Where where;
  int signal = 0;           // of a process
  Kind kind = Kind::kFlip;  // of a connection
  bool idle = false;        // no operation is in flight
  bool silence = false;     // with SOTTO_SILENCE_LIMIT_MS, on one of the ranks
  std::vector<std::string> codes = {"PEER_LOST"};
  bool vanishes = false;  // the process: its host acknowledges nothing any more
  bool hangs = false;     // the caller: it calls nothing any more, its progress thread answers
  bool isolated = false;  // nothing passes to or from the process any more; both sides live on
  bool times_out() const { return codes.front() == "TIMEOUT"; }
};

struct Case {
  Fault fault;
  uint32_t seed;
  int size;
  int rank;  // the guilty one; at the one end of the connection that is harmed
  bool to_target;
  int64_t delay_us;
  int connections;
  int heartbeat_ms;
};

Case draw(const Fault& fault, uint32_t seed) {
  std::mt19937 random(seed * 977 + static_cast<uint32_t>(fault.where));
  Case c{fault,
         seed,
         2 + static_cast<int>(seed % 3),
         0,
         random() % 2 == 0,
         static_cast<int64_t>(random() % 40'000),
         2,
         100};
  c.connections = 1 + static_cast<int>(random() % 3);
  // What shows on control connections shows with the next sign of life.
  c.heartbeat_ms = fault.where != Where::kControl && random() % 2 == 0 ? 1000 : 100;
  if (fault.isolated) {  // all its connections pass its own proxies
    c.rank = c.size - 1;
    return c;
  }
  const int lowest = fault.where == Where::kProcess ? 0 : 1;
  c.rank = lowest + static_cast<int>(random() % static_cast<uint32_t>(c.size - lowest));
  return c;
}

// Everything that stands between the ranks.
struct Wires {
  explicit Wires(const Case& c, std::string name) : files(std::move(name)) {
    for (int r = 0; r < c.size; ++r) {
      ports.push_back(std::make_unique<ReservedPort>());
      data.push_back(std::make_unique<FaultyProxy>(
          ProxyOptions{.target_port = ports.back()->number(), .seed = c.seed}));
    }
  }
  ~Wires() {
    for (size_t r = 0; r < ports.size(); ++r) std::filesystem::remove(files + std::to_string(r));
  }
  // A control connection of its own for every member, through a proxy unless `direct`.
  void spread_id(int size, bool direct) {
    UniqueId id{};
    require(await_published(files + "0", id.data(), id.size(), 30'000), "rank 0's id");
    const uint16_t port = check(decode_unique_id(id)).port;
    for (int r = 1; r < size; ++r) {
      control.push_back(std::make_unique<FaultyProxy>(ProxyOptions{.target_port = port}));
      const UniqueId theirs = redirected(id, direct ? port : control.back()->port());
      publish(files + std::to_string(r), theirs.data(), theirs.size());
    }
  }
  json task(const Case& c) const {
    json task{{"files", files},
              {"seed", c.seed},
              {"idle", c.fault.idle},
              {"vanishes", c.fault.vanishes ? c.rank : -1},
              {"hangs", c.fault.hangs ? c.rank : -1},
              {"limits_silence", c.fault.silence ? static_cast<int>(c.seed) % c.size : -1},
              {"timeout_us", c.fault.times_out() ? kShortUs : kLongUs}};
    for (size_t r = 0; !c.fault.vanishes && r < ports.size(); ++r) {
      task["listen"].push_back(ports[r]->number());
      task["advertise"].push_back(data[r]->port());
    }
    return task;
  }

  std::string files;
  std::vector<std::unique_ptr<ReservedPort>> ports;
  std::vector<std::unique_ptr<FaultyProxy>> data;     // by rank
  std::vector<std::unique_ptr<FaultyProxy>> control;  // by rank, from 1 on
};

void harm(const Case& c, Processes& ranks, const Wires& wires) {
  const auto r = static_cast<size_t>(c.rank);
  if (c.fault.isolated) {
    wires.control[r - 1]->strike({.kind = Kind::kStall, .connection = -1});
    wires.data[r]->strike({.kind = Kind::kStall, .connection = -1});
    return;
  }
  if (c.fault.where == Where::kProcess) {
    if (c.fault.signal != 0) ranks.kill(c.rank, c.fault.signal);
    return;
  }
  FaultyProxy& proxy = c.fault.where == Where::kData ? *wires.data[r] : *wires.control[r - 1];
  ProxyFault fault{.kind = c.fault.kind, .to_target = c.to_target, .count = 1 + c.seed % 200};
  // Every lower rank has connected so often.
  if (c.fault.where == Where::kData)
    fault.connection = static_cast<int32_t>(c.seed) / 3 % (c.connections * c.rank);
  proxy.strike(fault);
}

// "" or what is wrong about how the ranks ended.
std::string judge(const Case& c, const std::vector<json>& ends, int64_t struck_ms) {
  const json* first = nullptr;
  for (int r = 0; r < c.size; ++r) {
    const json& end = ends[static_cast<size_t>(r)];
    if (end.is_null()) continue;
    const bool alone = c.fault.isolated && r == c.rank;  // it cannot know what the others found
    if (first == nullptr) first = &end;
    const std::string text = end["text"], code = end["code"];
    const std::string who = fmt::format("rank {}: {} {}", r, code, end.dump());
    if (!alone && (text != (*first)["text"] || code != (*first)["code"]))
      return who + "\n  but another: " + first->dump();
    if (!testing::Matches(testing::Contains(code))(c.fault.codes)) return who + ": the code";
    const int accused = end["accused"];
    const std::string name = fmt::format("rank {} (", accused);
    if (alone) {
      if (accused == r) return who + ": it accuses itself";
    } else if (c.fault.where == Where::kProcess) {
      const std::string named = fmt::format("rank {} (", c.rank);
      if (accused != c.rank ||
          (c.fault.hangs ? text.find("waiting for " + named) == std::string::npos
                         : text.find(named + "pid") != 0))
        return who + ": not the guilty one";
    } else {
      const bool data = c.fault.where == Where::kData;
      const std::vector<int> ends_of_it = {accused, end["reported_by"].get<int>()};
      const bool end_of_it = data ? c.fault.kind == Kind::kStall ||
                                        testing::Matches(testing::Contains(c.rank))(ends_of_it)
                                  : accused == c.rank || accused == 0;
      if (!end_of_it || text.find(name) == std::string::npos) return who + ": neither end";
      if (text.find("connection between") == std::string::npos && code != "TIMEOUT" &&
          !c.fault.silence)
        return who + ": it is about a connection";
      if (text.find(" is lost: ") != std::string::npos &&
          text.find("connection between") == std::string::npos)
        return who + ": no rank is lost";
    }
    if (c.fault.silence && end["failed_at_ms"].get<int64_t>() - struck_ms > 3 * kSilenceMs)
      return who + fmt::format(": late, {} was the time of the fault", struck_ms);
    for (const int64_t ms : end["took_ms"]) {
      if (ms > kDestroyMs) return who + ": destroying takes too long";
    }
  }
  return "";
}

std::string run_case(const Case& c) {
  Wires wires(c, fmt::format("{}sotto-cause-{}-{}-{}-", testing::TempDir(), getpid(), c.fault.name,
                             c.seed));
  ProcessOptions options;
  options.argument = wires.task(c).dump();
  options.timeout_ms = 200'000;
  options.environment = {"SOTTO_TRANSPORT=tcp", "SOTTO_CPU_THREADS=1",
                         fmt::format("SOTTO_CONNECTIONS={}", c.connections),
                         fmt::format("SOTTO_HEARTBEAT_MS={}", c.heartbeat_ms),
                         fmt::format("SOTTO_TCP_USER_TIMEOUT_MS={}", kShortUs / 1000)};
  Processes ranks("cause_fault", c.size, options);
  wires.spread_id(c.size, c.fault.vanishes);
  for (int r = 0; r < c.size; ++r) ranks.await(r, "working");
  std::this_thread::sleep_for(std::chrono::microseconds(c.delay_us));
  const int64_t struck_ms = now_ms();
  harm(c, ranks, wires);
  std::vector<json> ends(static_cast<size_t>(c.size));
  for (int r = 0; r < c.size; ++r) {
    const bool speaks = c.fault.where != Where::kProcess || c.fault.hangs || c.fault.isolated;
    if (speaks || r != c.rank) ends[static_cast<size_t>(r)] = json::parse(ranks.message(r));
  }
  if (c.fault.signal == SIGSTOP || c.fault.vanishes) ranks.kill(c.rank, SIGKILL);
  ranks.wait_all();
  if (const std::string failure = ranks.failure(); !failure.empty()) return failure;
  return judge(c, ends, struck_ms);
}

const std::vector<Fault>& faults() {
  static const std::vector<Fault> all{
      {"killed", Where::kProcess, SIGKILL},
      {"killed_idle", Where::kProcess, SIGKILL, {}, true},
      {"stopped", Where::kProcess, SIGSTOP, {}, false, false, {"TIMEOUT", "PEER_LOST"}},
      {"stopped_silence", Where::kProcess, SIGSTOP, {}, false, true},
      {"stopped_idle_silence", Where::kProcess, SIGSTOP, {}, true, true},
      {"vanished_idle", Where::kProcess, 0, {}, true, false, {"PEER_LOST"}, true},
      {"hung", Where::kProcess, 0, {}, false, false, {"TIMEOUT"}, false, true},
      {"isolated",
       Where::kProcess,
       0,
       {},
       false,
       false,
       {"TIMEOUT", "PEER_LOST"},
       false,
       false,
       true},
      {"control_reset", Where::kControl, 0, Kind::kReset},
      {"control_closed_idle", Where::kControl, 0, Kind::kClose, true},
      {"control_flipped", Where::kControl, 0, Kind::kFlip, true, false, {"PROTOCOL"}},
      {"control_stalled", Where::kControl, 0, Kind::kStall, true, true},
      {"control_swallowed", Where::kControl, 0, Kind::kSwallow, true, false, {"PROTOCOL"}},
      {"data_reset", Where::kData, 0, Kind::kReset},
      {"data_closed", Where::kData, 0, Kind::kClose},
      {"data_flipped", Where::kData, 0, Kind::kFlip, false, false, {"PROTOCOL"}},
      {"data_stalled", Where::kData, 0, Kind::kStall, false, false, {"TIMEOUT"}},
  };
  return all;
}

uint32_t cases_per_fault() {
  const char* wanted = std::getenv("TEST_FAULT_CASES");
  const int cases = wanted != nullptr ? std::atoi(wanted) : kSanitized ? 17 : 68;
  return std::max(1, cases / static_cast<int>(faults().size()));
}

class CauseFault : public testing::TestWithParam<Fault> {};

TEST_P(CauseFault, IsTheSameOnAllRanks) {
  std::atomic<uint32_t> next{1};
  std::mutex mutex;
  std::string wrong;
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes.emplace_back([&] {
      for (uint32_t seed; (seed = next++) <= cases_per_fault();) {
        const Case c = draw(GetParam(), seed);
        std::string text;
        try {
          text = run_case(c);
        } catch (const std::exception& e) {
          text = e.what();
        }
        if (text.empty()) continue;
        const std::lock_guard lock(mutex);
        wrong += fmt::format("seed {}, rank {} of {}:\n  {}\n", seed, c.rank, c.size, text);
      }
    });
  }
  for (std::thread& lane : lanes) lane.join();
  EXPECT_EQ(wrong, "");
}

INSTANTIATE_TEST_SUITE_P(Kinds, CauseFault, testing::ValuesIn(faults()),
                         [](const auto& p) { return p.param.name; });

}  // namespace
}  // namespace sotto::test
