// Ranks as processes over TCP, one of them killed or stopped at a seeded moment of rendezvous,
// collectives, optimizer steps or state export. The others must end every operation with an error
// that names it, keep their parameters as the last committed step left them, and be able to make a
// new comm with each other in the same processes.
#include <gtest/gtest.h>
#include <signal.h>

#include "core/base/hash.h"
#include "core/cpu/cpu_device.h"
#include "core/state/optim_state.h"
#include "tests/support/calls.h"
#include "tests/support/core_ranks.h"
#include "tests/support/kill_campaign.h"
#include "tests/support/sanitized.h"

namespace sotto::test {
namespace {

constexpr uint64_t kElements = 200'000;
constexpr const char* kJson =
    R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.001, "freeze_step": 4}},
                                  "gradient_clipping": 1.0})";

// Seeded cases per phase. Sanitizers make everything slower.
constexpr uint32_t kKills = kSanitized ? 4 : 20;
constexpr uint32_t kStops = kSanitized ? 1 : 5;

std::shared_ptr<Context> make_context() {
  ContextOptions options;
  options.params.transport = "tcp";
  options.params.heartbeat_ms = 100;
  options.environment = process_environment();
  options.device = std::make_shared<CpuDevice>(1, SimdLevel::kAuto);
  options.backends = standard_backends();
  return std::make_shared<Context>(std::move(options));
}

// Rank 0 makes the id and tells the others through the file system.
Result<std::shared_ptr<Comm>> create_comm(const std::shared_ptr<Context>& context, int rank,
                                          int size, const std::string& file, int64_t timeout_us) {
  CommConfig config;
  config.rank = rank;
  config.size = size;
  config.timeout_us = timeout_us;
  UniqueId id{};
  if (rank == 0) {
    SOTTO_ASSIGN(id, context->make_unique_id());
    publish(file, id.data(), id.size());
  } else if (!await_published(file, id.data(), id.size(), timeout_us / 1000)) {
    return error(Code::kTimeout, "no id");
  }
  config.id = id;
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
      SOTTO_TRY(all_reduce(comm, data));
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

// The process lives on: a comm of the survivors works.
Status work_again(const std::shared_ptr<Context>& context, const ProcessRank& self,
                  const KillTask& task) {
  SOTTO_ASSIGN(const std::shared_ptr<Comm> comm,
               create_comm(context, task.next_rank(self.rank), self.size - 1, task.next_id_file(),
                           kNextTimeoutUs));
  std::vector<float> data(1000, 1.0f);
  SOTTO_TRY(all_reduce(comm, data));
  if (data != std::vector<float>(1000, static_cast<float>(comm->size())))
    return error(Code::kInternal, "the result is wrong");
  return comm->barrier();
}

SOTTO_RANK_MAIN(group_fault) {
  const KillTask task = KillTask::parse(self);
  const std::shared_ptr<Context> context = make_context();
  self.at("started");
  Work work;
  Status status;
  {
    Result<std::shared_ptr<Comm>> comm =
        create_comm(context, self.rank, self.size, task.id_file, task.timeout_us);
    status = comm.ok() ? work_until_failure(*comm, self, task.what, work) : comm.status();
    if (comm.ok() && (*comm)->failure().ok())
      status = error(Code::kInternal, "the comm does not know its failure");
    if (work.optimizer != nullptr && work.committed != hash64(work.p.data(), work.p.size() * 4)) {
      status = error(Code::kInternal, "parameters of a failed step have changed");
    }
    work.optimizer.reset();
  }
  const Status again = work_again(context, self, task);
  if (!again.ok())
    status = error(Code::kInternal, "a new comm after the failure: {}", again.text());
  self.say(fmt::format("{} {}", code_name(status.code()), status.text()));
  return 0;
}

struct Fault {
  const char* what;
  int signal;
};

class GroupFault : public ::testing::TestWithParam<Fault> {};

TEST_P(GroupFault, SurvivorsNameTheRankAndLiveOn) {
  const bool stop = GetParam().signal == SIGSTOP;
  const std::string what = GetParam().what;
  std::vector<KillCase> all;
  for (uint32_t seed = 1; seed <= (stop ? kStops : kKills); ++seed) {
    KillCase& c = all.emplace_back(KillCase{
        .rank_main = "group_fault", .what = what, .signal = GetParam().signal, .seed = seed});
    c.while_they_meet = what == "rendezvous";
    if (c.while_they_meet) c.what = "collective";
  }
  run_kill_cases(all);
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
