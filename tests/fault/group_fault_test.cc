// Ranks as processes over TCP, one of them killed or stopped at a seeded moment of rendezvous,
// collectives, optimizer steps or state export. The others must end every operation with an error
// that names it, keep their parameters as the last committed step left them, and be able to make a
// new comm in the same process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>

#include "core/base/hash.h"
#include "core/cpu/cpu_device.h"
#include "core/state/optim_state.h"
#include "tests/support/core_ranks.h"
#include "tests/support/processes.h"

namespace sotto::test {
namespace {

constexpr uint64_t kElements = 40'000;
constexpr const char* kJson =
    R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.001, "freeze_step": 4}},
                                  "gradient_clipping": 1.0})";

// Time without progress after which a rank gives up, and how many seeded cases there are per phase:
// sanitizers make everything slower.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int64_t kTimeoutUs = 10'000'000;
constexpr uint32_t kKills = 4;
constexpr uint32_t kStops = 1;
#else
constexpr int64_t kTimeoutUs = 3'000'000;
constexpr uint32_t kKills = 20;
constexpr uint32_t kStops = 5;
#endif

std::string hex(const UniqueId& id) {
  std::string out;
  for (uint8_t byte : id) out += fmt::format("{:02x}", byte);
  return out;
}

UniqueId unhex(const std::string& text) {
  UniqueId id{};
  for (size_t i = 0; i < id.size(); ++i)
    id[i] = static_cast<uint8_t>(std::stoul(text.substr(2 * i, 2), nullptr, 16));
  return id;
}

std::shared_ptr<Context> make_context() {
  ContextOptions options;
  options.params.transport = "tcp";
  options.params.heartbeat_ms = 100;
  options.environment = process_environment();
  options.device = std::make_shared<CpuDevice>(1, SimdLevel::kAuto);
  options.backends = standard_backends();
  return std::make_shared<Context>(std::move(options));
}

// Rank 0 makes the id and tells the others through the parent's file system.
Result<std::shared_ptr<Comm>> meet(const std::shared_ptr<Context>& context, const ProcessRank& self,
                                   const std::string& file, int64_t timeout_us) {
  CommConfig config;
  config.rank = self.rank;
  config.size = self.size;
  config.timeout_us = timeout_us;
  if (self.rank == 0) {
    SOTTO_ASSIGN(config.id, context->make_unique_id());
    const std::string temporary = file + ".new";
    FILE* out = std::fopen(temporary.c_str(), "w");
    std::fputs(hex(*config.id).c_str(), out);
    std::fclose(out);
    std::rename(temporary.c_str(), file.c_str());
  } else {
    FILE* in = nullptr;
    for (int i = 0; i < 300 && (in = std::fopen(file.c_str(), "r")) == nullptr; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    if (in == nullptr) return error(Code::kTimeout, "no id");
    char text[257] = {};
    const size_t got = std::fread(text, 1, 256, in);
    std::fclose(in);
    if (got != 256) return error(Code::kInternal, "short id");
    config.id = unhex(text);
  }
  return Comm::create(context, config);
}

struct Work {
  std::vector<float> p = std::vector<float>(kElements, 0.5f);
  std::vector<float> g = std::vector<float>(kElements);
  std::shared_ptr<Optimizer> optimizer;
  uint64_t committed = 0;  // hash of the parameters after the last step that ended OK

  Status step(uint64_t k, int rank) {
    for (uint64_t i = 0; i < kElements; ++i) {
      g[i] = static_cast<float>((i * 31 + k * 17 + static_cast<uint64_t>(rank) * 7) % 23) - 11;
    }
    SOTTO_ASSIGN(const OpRef op, optimizer->step({}));
    SOTTO_TRY(optimizer->comm()->engine().wait(op, -1));
    committed = hash64(p.data(), p.size() * 4);
    return ok_status();
  }
};

Status all_reduce_once(const std::shared_ptr<Comm>& comm, std::vector<float>& data) {
  Call call;
  call.request.kind = OpKind::kAllReduce;
  call.request.rank = comm->rank();
  call.request.size = comm->size();
  call.request.counts = {data.size()};
  call.request.dtypes = {Dtype::kF32};
  call.request.in_place = {1};
  call.in = {data.data()};
  call.out = {data.data()};
  return comm->finish(comm->start(std::move(call), {}));
}

// Works until something fails.
Status work_until_failure(const std::shared_ptr<Comm>& comm, const ProcessRank& self,
                          const std::string& what, Work& work) {
  std::vector<float> data(100'000, 1.0f);
  if (what == "step" || what == "state") {
    SOTTO_ASSIGN(work.optimizer,
                 Optimizer::create(comm, kJson,
                                   {{"p", kElements, 0, work.p.data(), work.g.data(), nullptr}}));
    work.committed = hash64(work.p.data(), work.p.size() * 4);
  }
  for (uint64_t k = 0;; ++k) {
    if (k == 3) self.at("working");
    if (what == "collective") {
      SOTTO_TRY(all_reduce_once(comm, data));
    } else {
      SOTTO_TRY(work.step(k, self.rank));
      if (what == "state") {
        SOTTO_ASSIGN([[maybe_unused]] const auto blob,
                     export_state(*work.optimizer, StateMode::kExact));
        SOTTO_TRY(comm->barrier());
      }
    }
  }
}

// argument: file|what
SOTTO_RANK_MAIN(group_fault) {
  const size_t bar = self.argument.find('|');
  const std::string file = self.argument.substr(0, bar);
  const std::string what = self.argument.substr(bar + 1);
  const std::shared_ptr<Context> context = make_context();
  self.at("started");
  Work work;
  Status status;
  {
    Result<std::shared_ptr<Comm>> comm = meet(context, self, file, kTimeoutUs);
    status = comm.ok() ? work_until_failure(*comm, self, what, work) : comm.status();
    if (comm.ok() && (*comm)->failure().ok())
      status = error(Code::kInternal, "the comm does not know its failure");
    if (work.optimizer != nullptr && work.committed != hash64(work.p.data(), work.p.size() * 4)) {
      status = error(Code::kInternal, "parameters of a failed step have changed");
    }
    work.optimizer.reset();
  }
  // The process lives on: a comm of its own works.
  CommConfig alone;
  alone.size = 1;
  alone.transport = "inproc";
  const Result<std::shared_ptr<Comm>> again = Comm::create(context, alone);
  std::vector<float> data(10, 1.0f);
  if (!again.ok() || !all_reduce_once(*again, data).ok())
    status = error(Code::kInternal, "no new comm after the failure");
  self.say(fmt::format("{} {}", code_name(status.code()), status.text()));
  return 0;
}

struct Fault {
  const char* what;
  int signal;
};

void run_case(const Fault& fault, uint32_t seed) {
  SCOPED_TRACE(fmt::format("{} signal {} seed {}", fault.what, fault.signal, seed));
  std::mt19937 random(seed);
  const int size = 2 + static_cast<int>(random() % 3);
  const int victim = static_cast<int>(random() % static_cast<uint32_t>(size));
  const auto delay = std::chrono::microseconds(random() % 8000);
  const std::string file = fmt::format("{}sotto-fault-{}-{}-{}-{}", testing::TempDir(), getpid(),
                                       fault.what, fault.signal, seed);
  const bool rendezvous = std::string_view(fault.what) == "rendezvous";
  ProcessOptions options;
  options.argument = file + "|" + (rendezvous ? "collective" : fault.what);
  if (rendezvous) options.stop_at = {fmt::format("{}:started", victim)};
  Processes ranks("group_fault", size, options);
  ranks.await(victim, rendezvous ? "started" : "working");
  if (rendezvous) ranks.go(victim);
  std::this_thread::sleep_for(delay);
  ranks.kill(victim, fault.signal);
  for (int r = 0; r < size; ++r) {
    if (r == victim) continue;
    const std::string text = ranks.message(r);
    // Rank 0 is where the others meet: without it they know its address, or not even that.
    if (rendezvous && victim == 0 &&
        (text == "TIMEOUT no id" || text.find("not reachable") != std::string::npos ||
         text.find("the coordinator at") != std::string::npos ||
         text.find("rendezvous with") != std::string::npos)) {
      continue;
    }
    EXPECT_THAT(text,
                testing::AnyOf(testing::StartsWith("PEER_LOST"), testing::StartsWith("TIMEOUT")));
    EXPECT_THAT(text, testing::ContainsRegex(fmt::format("rank(s|[(]s[)])? [0-9, ]*{}", victim)));
  }
  if (fault.signal == SIGSTOP) ranks.kill(victim, SIGKILL);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  std::remove(file.c_str());
}

class GroupFault : public ::testing::TestWithParam<Fault> {};

TEST_P(GroupFault, SurvivorsNameTheRankAndLiveOn) {
  const bool stop = GetParam().signal == SIGSTOP;
  for (uint32_t seed = 1; seed <= (stop ? kStops : kKills); ++seed) run_case(GetParam(), seed);
}

INSTANTIATE_TEST_SUITE_P(Phases, GroupFault,
                         ::testing::Values(Fault{"rendezvous", SIGKILL},
                                           Fault{"collective", SIGKILL}, Fault{"step", SIGKILL},
                                           Fault{"state", SIGKILL}, Fault{"rendezvous", SIGSTOP},
                                           Fault{"collective", SIGSTOP}, Fault{"step", SIGSTOP},
                                           Fault{"state", SIGSTOP}),
                         [](const auto& p) {
                           return std::string(p.param.what) +
                                  (p.param.signal == SIGKILL ? "_killed" : "_stopped");
                         });

}  // namespace
}  // namespace sotto::test
