// Four processes that use nothing but sotto.h, over TCP, over shared memory, or over UCX between
// two hosts; one of them is killed or stopped at a seeded moment of collectives or optimizer steps.
// The others must get PEER_LOST or TIMEOUT that names it from the call and from the comm, find
// parameters and step count as the last step that succeeded left them, and be able to make a new
// comm with each other.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <tuple>

#include "tests/ranks/capi_support.h"
#include "tests/support/kill_campaign.h"
#include "tests/support/sanitized.h"
#include "tests/support/ucx.h"

namespace sotto::test {
namespace {

constexpr int kSize = 4;
constexpr size_t kCounts[] = {200'000, 777};
constexpr const char* kJson =
    R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.001, "freeze_step": 4}}})";

struct Fault {
  const char* what;
  int signal;
  const char* transport;
};

// Seeded cases. Sanitizers make everything slower.
uint32_t cases_of(const Fault& fault) {
  if (fault.transport != std::string("tcp")) return kSanitized || fault.signal == SIGSTOP ? 1 : 4;
  if (fault.signal == SIGSTOP) return kSanitized ? 1 : 3;
  return kSanitized ? 3 : 12;
}

sotto_status create_comm(sotto_context* context, int rank, int size, const std::string& file,
                         int64_t timeout_us, sotto_comm** out) {
  sotto_unique_id id = {};
  if (rank == 0) {
    OK(sotto_unique_id_create(context, &id));
    publish(file, &id, sizeof id);
  } else {
    require(await_published(file, &id, sizeof id, timeout_us / 1000), "no id");
  }
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  config.rank = rank;
  config.size = size;
  config.id = &id;
  config.timeout_us = timeout_us;
  return sotto_comm_create(context, &config, out);
}

struct Model {
  std::vector<float> weights[2], gradients[2], committed[2];
  sotto_optim* optim = nullptr;
  uint64_t steps = 0;  // that have succeeded

  explicit Model(sotto_comm* comm) {
    static const char* const kNames[] = {"w", "b"};
    std::vector<sotto_param> params;
    for (size_t t = 0; t < 2; ++t) {
      weights[t].assign(kCounts[t], 0.5f);
      gradients[t].resize(kCounts[t]);
      committed[t] = weights[t];
      sotto_param p = {};
      p.struct_size = sizeof p;
      p.name = kNames[t];
      p.param = buffer(weights[t]);
      p.grad = buffer(gradients[t]);
      params.push_back(p);
    }
    OK(sotto_optim_create(comm, kJson, params.data(), params.size(), &optim));
  }
  ~Model() { sotto_optim_destroy(optim); }

  sotto_status step(int rank) {
    for (std::vector<float>& g : gradients) {
      for (size_t i = 0; i < g.size(); ++i)
        g[i] = static_cast<float>((i * 31 + steps * 17 + static_cast<size_t>(rank) * 7) % 23) - 11;
    }
    const sotto_status status = sotto_optim_step(optim, nullptr, nullptr);
    if (status == SOTTO_OK) {
      ++steps;
      std::copy(std::begin(weights), std::end(weights), std::begin(committed));
    }
    return status;
  }

  // After a step that failed.
  void check_untouched() const {
    require(std::equal(std::begin(weights), std::end(weights), std::begin(committed)),
            "parameters have changed in a step that failed");
    sotto_optim_info info = {};
    info.struct_size = sizeof info;
    OK(sotto_optim_get_info(optim, &info));
    require(info.step == steps, "a step that failed has counted");
  }
};

// Works until a call fails; its error. Text: "PEER_LOST rank 2 ...".
std::string work_until_failure(sotto_comm* comm, const ProcessRank& self, const std::string& what) {
  std::vector<float> data(100'000, 1.0f);
  const sotto_buffer all = buffer(data);
  std::unique_ptr<Model> model;
  if (what == "step") model = std::make_unique<Model>(comm);
  sotto_status status = SOTTO_OK;
  for (int k = 0; status == SOTTO_OK; ++k) {
    if (k == 3) self.at("working");
    status = model != nullptr ? model->step(self.rank)
                              : sotto_all_reduce(comm, &all, &all, 1, nullptr, nullptr);
  }
  const std::string text = sotto_last_error();
  const char* cause = nullptr;
  require(sotto_comm_error(comm, &cause) == status, "the comm has the status of the call");
  require(text.find(cause) != std::string::npos, text + "; but the comm: " + cause);
  if (model != nullptr) model->check_untouched();
  return std::string(sotto_status_name(status)) + " " + text;
}

void work_again(sotto_context* context, const ProcessRank& self, const KillTask& task) {
  sotto_comm* comm = nullptr;
  OK(create_comm(context, task.next_rank(self.rank), self.size - 1, task.next_id_file(),
                 kNextTimeoutUs, &comm));
  std::vector<float> data(1000, 1.0f);
  const sotto_buffer all = buffer(data);
  OK(sotto_all_reduce(comm, &all, &all, 1, nullptr, nullptr));
  require(data == std::vector<float>(1000, static_cast<float>(self.size - 1)),
          "the result of the new comm");
  OK(sotto_barrier(comm, nullptr, nullptr));
  OK(sotto_comm_destroy(comm));
}

SOTTO_RANK_MAIN(capi_fault) {
  const KillTask task = KillTask::parse(self);
  if (std::getenv("SOTTO_TRANSPORT") == std::string("ucx"))
    ::setenv("SOTTO_HOST_ID", self.rank < 2 ? "a" : "b", 1);
  sotto_context* const context = new_context();
  self.at("started");
  sotto_comm* comm = nullptr;
  OK(create_comm(context, self.rank, self.size, task.id_file, task.timeout_us, &comm));
  const std::string text = work_until_failure(comm, self, task.what);
  const std::string left = sotto_status_name(sotto_comm_destroy(comm));
  require(text.starts_with(left + " "), "destroying the comm says " + left + " after " + text);
  work_again(context, self, task);
  OK(sotto_context_destroy(context));
  std::string line = text;
  std::replace(line.begin(), line.end(), '\n', ' ');
  self.say(line);
  return 0;
}

class CapiFault : public testing::TestWithParam<std::tuple<const char*, int, const char*>> {
 protected:
  Fault fault() const { return std::make_from_tuple<Fault>(GetParam()); }
  void SetUp() override {
    if (fault().transport == std::string("ucx") && why_no_ucx() != nullptr)
      GTEST_SKIP() << why_no_ucx();
  }
};

TEST_P(CapiFault, SurvivorsNameTheRankAndLiveOn) {
  std::vector<KillCase> all;
  for (uint32_t seed = 1; seed <= cases_of(fault()); ++seed) {
    KillCase& c = all.emplace_back(
        KillCase{.rank_main = "capi_fault", .what = fault().what, .signal = fault().signal});
    c.seed = seed;
    c.size = kSize;
    c.environment = {std::string("SOTTO_TRANSPORT=") + fault().transport, "SOTTO_HEARTBEAT_MS=100",
                     "SOTTO_CPU_THREADS=1", "UCX_TLS=tcp"};
  }
  run_kill_cases(all);
}

INSTANTIATE_TEST_SUITE_P(Work, CapiFault,
                         testing::Combine(testing::Values("collective", "step"),
                                          testing::Values(SIGKILL, SIGSTOP),
                                          testing::Values("tcp", "shm", "ucx")),
                         [](const auto& p) {
                           return fmt::format(
                               "{}_{}_{}", std::get<0>(p.param),
                               std::get<1>(p.param) == SIGKILL ? "killed" : "stopped",
                               std::get<2>(p.param));
                         });

}  // namespace
}  // namespace sotto::test
