// Damage on one of the data connections of real TCP ranks: a proxy between rank 0 and rank 1 flips
// a bit, swallows bytes, closes, resets or stalls at a seeded byte, while the ranks meet, reduce or
// take optimizer steps. Every rank must end with the same error that names one of the two, with
// nothing half applied: parameters and optimizer state as the last finished step left them, equal
// between the ranks that finished the same one. And the same contexts must be able to make a comm
// that works.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <random>
#include <thread>

#include "core/base/hash.h"
#include "core/cpu/cpu_device.h"
#include "core/state/optim_state.h"
#include "tests/support/calls.h"
#include "tests/support/core_ranks.h"
#include "tests/support/faulty_proxy.h"
#include "tests/support/ranks.h"
#include "tests/support/reserved_port.h"
#include "tests/support/sanitized.h"

namespace sotto::test {
namespace {

using Kind = ProxyFault::Kind;

// Time without progress after which a rank gives up: where only that ends the case, and where
// something else has to end it before. Sanitizers make everything slower.
constexpr int64_t kShortUs = kSanitized ? 12'000'000 : 6'000'000;
constexpr int64_t kLongUs = 90'000'000;
constexpr uint32_t kSeeds = kSanitized ? 3 : 12;
constexpr int64_t kNeverNs = 100'000'000'000;  // a case in which nothing fails
constexpr int64_t kEverythingMs = 3 * kNeverNs / 2'000'000;
// Cases that run at once: most of their time they wait.
constexpr int kLanes = 4;

constexpr const char* kKindNames[] = {"flip", "swallow", "close", "reset", "stall"};
constexpr const char* kWork[] = {"all_reduce", "onebit", "adam", "lamb", "onebit_lamb"};
constexpr uint64_t kElements = 10'000;  // a dense step sends 40 KB, a compressed one 1.4 KB

struct FrameCase {
  uint32_t seed = 0;
  int size = 2;
  std::string work;
  ProxyFault fault;
};

// The first connection is that of small messages, and all that compressed steps send is small. Sums
// send hardly anything that is.
int32_t connection_of(const std::string& work, std::mt19937& random) {
  if (work == "onebit" || work == "onebit_lamb") return 0;
  return work == "all_reduce" ? 1 : static_cast<int32_t>(random() % 2);
}

FrameCase draw(Kind kind, uint32_t seed) {
  std::mt19937 random(seed * 5 + static_cast<uint32_t>(kind));
  FrameCase c;
  c.seed = seed;
  c.size = 2 + static_cast<int>(random() % 3);
  c.work = kWork[seed % std::size(kWork)];
  c.fault.kind = kind;
  c.fault.to_target = random() % 2 == 0;
  // The greeting, the first operations, or later ones.
  const uint64_t reach[] = {160, 3'000, 200'000, 200'000};
  c.fault.at = random() % reach[random() % std::size(reach)];
  c.fault.count = 1 + random() % 200;
  c.fault.connection = connection_of(c.work, random);
  return c;
}

std::string text_of(const FrameCase& c) {
  return fmt::format("{} at byte {} {} rank 1, {} of {} ranks, seed {}",
                     kKindNames[static_cast<size_t>(c.fault.kind)], c.fault.at,
                     c.fault.to_target ? "to" : "from", c.work, c.size, c.seed);
}

// What one rank works on, and what it looked like after every operation that ended well.
struct Work {
  std::vector<float> p = std::vector<float>(kElements, 0.5f);
  std::vector<float> g = std::vector<float>(kElements);
  std::vector<float> out = std::vector<float>(kElements);
  std::shared_ptr<Optimizer> optimizer;
  std::shared_ptr<Codec> codec;
  std::vector<uint64_t> results;  // of each operation, the same on all ranks
  uint64_t own = 0;               // of parameters and exported state after the last one

  Status prepare(const std::shared_ptr<Comm>& comm, const std::string& what);
  Status operate(const std::shared_ptr<Comm>& comm);
  Result<uint64_t> look() const;
};

Status reduce_dense(const std::shared_ptr<Comm>& comm, std::vector<float>& in,
                    std::vector<float>& out) {
  Call call = all_reduce_of(*comm, in.data(), out.data(), in.size());
  return comm->finish(comm->start(std::move(call), {}));
}

Status Work::prepare(const std::shared_ptr<Comm>& comm, const std::string& what) {
  if (what == "onebit") {
    SOTTO_ASSIGN(codec, Codec::create(comm, R"({"type": "1bit"})", {kElements}, {Dtype::kF32}));
  } else if (what != "all_reduce") {
    const char* type = what == "adam" ? "Adam" : what == "lamb" ? "Lamb" : "OneBitLamb";
    const std::string json =
        fmt::format(R"({{"optimizer": {{"type": "{}", "params": {{"lr": 0.001{}}}}}}})", type,
                    what == "onebit_lamb" ? R"(, "freeze_step": 3)" : "");
    SOTTO_ASSIGN(optimizer,
                 Optimizer::create(comm, json, {{"p", kElements, 0, p.data(), g.data(), nullptr}}));
  }
  SOTTO_ASSIGN(own, look());
  return ok_status();
}

Status Work::operate(const std::shared_ptr<Comm>& comm) {
  const auto salt = results.size() * 17 + static_cast<uint64_t>(comm->rank()) * 7;
  for (uint64_t i = 0; i < kElements; ++i) g[i] = static_cast<float>((i * 31 + salt) % 23) - 11;
  if (optimizer != nullptr) {
    SOTTO_ASSIGN(const OpRef op, optimizer->step({}));
    SOTTO_TRY(comm->engine().wait(op, -1));
    results.push_back(hash64(p.data(), p.size() * 4));
  } else {
    SOTTO_TRY(codec != nullptr ? comm->finish(codec->all_reduce({g.data()}, {out.data()}, {}))
                               : reduce_dense(comm, g, out));
    results.push_back(hash64(out.data(), out.size() * 4));
  }
  SOTTO_ASSIGN(own, look());
  return ok_status();
}

// A hash over everything that a failed operation must leave alone on this rank: parameters and
// optimizer state. Error feedback is put back up to rounding, or starts at zero again.
Result<uint64_t> Work::look() const {
  std::vector<std::byte> state;
  if (optimizer != nullptr) {
    SOTTO_ASSIGN(state, export_state(*optimizer, StateMode::kReset));
  }
  return hash64(p.data(), p.size() * 4) ^ hash64(state.data(), state.size());
}

std::shared_ptr<Context> make_context(int rank, const ReservedPort& port, uint16_t proxy) {
  ContextOptions options;
  options.params.transport = "tcp";
  options.params.heartbeat_ms = 100;
  tcp::Params own;
  if (rank == 1) {
    own.listen_port = port.number();
    own.advertise = fmt::format(":{}", proxy);
  }
  options.environment = process_environment();
  options.device = std::make_shared<CpuDevice>(1, SimdLevel::kAuto);
  options.backends = standard_backends(own);
  return std::make_shared<Context>(std::move(options));
}

Result<std::shared_ptr<Comm>> make_comm(const std::shared_ptr<Context>& context, int rank, int size,
                                        const UniqueId& id, int64_t timeout_us) {
  CommConfig config;
  config.rank = rank;
  config.size = size;
  config.id = id;
  config.timeout_us = timeout_us;
  return Comm::create(context, config);
}

// How one rank ended.
struct End {
  Status status;
  std::vector<uint64_t> results;
  bool connected = false;  // there was a comm
};

End work_until_failure(const std::shared_ptr<Context>& context, const FrameCase& c, int rank,
                       const UniqueId& id, int64_t timeout_us) {
  const auto created = make_comm(context, rank, c.size, id, timeout_us);
  if (!created.ok()) return {created.status(), {}, false};
  const std::shared_ptr<Comm>& comm = *created;
  Work work;
  Status status = work.prepare(comm, c.work);
  require(status.ok() || !comm->failure().ok(), "preparing: " + status.text());
  const int64_t until = Clock::monotonic().now_ns() + kNeverNs;
  while (status.ok()) {
    require(Clock::monotonic().now_ns() < until, "the fault has not made anything fail");
    status = work.operate(comm);
  }
  require(!comm->failure().ok(), "the comm does not know its failure: " + status.text());
  require(comm->failure().text() == status.text(),
          status.text() + "; but the comm: " + comm->failure().text());
  if (work.optimizer != nullptr) {
    require(check(work.look(), "state after the failure") == work.own,
            "parameters or state have changed in an operation that failed");
  }
  return {status, work.results, true};
}

void check_new_comm(const std::shared_ptr<Context>& context, const FrameCase& c, int rank,
                    const UniqueId& id) {
  const auto comm = check(make_comm(context, rank, c.size, id, kLongUs), "a new comm");
  std::vector<float> in(kElements), out(kElements);
  for (uint64_t i = 0; i < kElements; ++i)
    in[i] = static_cast<float>((i + static_cast<uint64_t>(rank)) % 16);
  check(reduce_dense(comm, in, out), "all-reduce of a new comm");
  for (uint64_t i = 0; i < kElements; ++i) {
    float want = 0;
    for (int r = 0; r < c.size; ++r)
      want += static_cast<float>((i + static_cast<uint64_t>(r)) % 16);
    require(out[i] == want, "the result of a new comm");
  }
}

// A rank that hears of the failure while it waits for the others says so first.
bool same_cause(const std::string& a, const std::string& b) {
  return a.size() >= b.size() ? a.ends_with(b) : b.ends_with(a);
}

// "" or what is wrong about how the ranks ended.
std::string judge(const FrameCase& c, const std::vector<End>& ends) {
  const auto allowed = [&](Code code) {
    switch (c.fault.kind) {
      case Kind::kFlip: return code == Code::kProtocol || code == Code::kPeerLost;
      case Kind::kSwallow:
        return code == Code::kProtocol || code == Code::kPeerLost || code == Code::kTimeout;
      case Kind::kClose:
      case Kind::kReset: return code == Code::kPeerLost;
      case Kind::kStall: return code == Code::kTimeout;
    }
    return false;
  };
  for (size_t r = 0; r < ends.size(); ++r) {
    const Status& status = ends[r].status;
    const std::string who = fmt::format("rank {}: {} ", r, code_name(status.code()));
    if (!allowed(status.code())) return who + status.text();
    const testing::Matcher<std::string> names = testing::ContainsRegex(
        "(to|waiting for .*) rank([(]s[)])? [01]|waiting for rank [01]|rank [01] [(]pid|rank [01] "
        "did not come");
    if (!names.Matches(status.text())) return who + "names neither: " + status.text();
    // Each rank has its own time limit for the rendezvous.
    const bool own_limit = !ends[r].connected && status.code() == Code::kTimeout;
    if (!own_limit && !same_cause(status.text(), ends[0].status.text()))
      return who + status.text() + "; but rank 0: " + ends[0].status.text();
    for (size_t k = 0; k < std::min(ends[r].results.size(), ends[0].results.size()); ++k) {
      if (ends[r].results[k] != ends[0].results[k])
        return who + fmt::format("operation {} has other bits than on rank 0", k);
    }
  }
  return "";
}

std::string run_case(const FrameCase& c) {
  const bool waits = c.fault.kind == Kind::kStall || c.fault.kind == Kind::kSwallow;
  const ReservedPort port;
  // Only a connection of the first comm is harmed; those of the second pass.
  FaultyProxy proxy({.target_port = port.number(),
                     .seed = c.seed,
                     .max_delay_us = 100,
                     .max_chunk = 20'000,
                     .faults = {c.fault}});
  std::vector<std::shared_ptr<Context>> contexts;
  for (int r = 0; r < c.size; ++r) contexts.push_back(make_context(r, port, proxy.port()));
  const UniqueId id = check(contexts[0]->make_unique_id());
  UniqueId second{};
  std::vector<End> ends(static_cast<size_t>(c.size));
  RankBarrier barrier(c.size, kEverythingMs);
  const auto body = [&](int rank) {
    const auto& context = contexts[static_cast<size_t>(rank)];
    try {
      ends[static_cast<size_t>(rank)] =
          work_until_failure(context, c, rank, id, waits ? kShortUs : kLongUs);
      if (rank == 0) second = check(context->make_unique_id());
    } catch (...) {
      barrier.break_off();
      throw;
    }
    barrier.wait();
    check_new_comm(context, c, rank, second);
  };
  const std::string broken = run_ranks(c.size, body, kEverythingMs);
  if (!broken.empty()) return broken;
  if (proxy.faults() == 0) return "the proxy has done no harm";
  return judge(c, ends);
}

class FrameFault : public testing::TestWithParam<Kind> {};

TEST_P(FrameFault, EveryRankNamesItAndLivesOn) {
  std::atomic<uint32_t> next{1};
  std::mutex mutex;
  std::string wrong;
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes.emplace_back([&] {
      for (uint32_t seed; (seed = next++) <= kSeeds;) {
        const FrameCase c = draw(GetParam(), seed);
        std::string text;
        try {
          text = run_case(c);
        } catch (const std::exception& e) {
          text = e.what();
        }
        if (text.empty()) continue;
        const std::lock_guard lock(mutex);
        wrong += text_of(c) + ":\n  " + text + "\n";
      }
    });
  }
  for (std::thread& lane : lanes) lane.join();
  EXPECT_EQ(wrong, "");
}

INSTANTIATE_TEST_SUITE_P(Kinds, FrameFault,
                         testing::Values(Kind::kFlip, Kind::kSwallow, Kind::kClose, Kind::kReset,
                                         Kind::kStall),
                         [](const auto& p) { return kKindNames[static_cast<size_t>(p.param)]; });

}  // namespace
}  // namespace sotto::test
