// A world of one rank works whatever started it: it connects to no peer, so no address matters.
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "tests/ranks/capi_support.h"
#include "tests/support/reserved_port.h"

namespace sotto::test {
namespace {

using Variables = std::vector<std::pair<std::string, std::string>>;

// Environment variables, gone again at the end.
class Scope {
 public:
  explicit Scope(Variables variables) : variables_(std::move(variables)) {
    for (const auto& [name, value] : variables_) setenv(name.c_str(), value.c_str(), 1);
  }
  ~Scope() {
    for (const auto& [name, value] : variables_) unsetenv(name.c_str());
  }

 private:
  Variables variables_;
};

void every_collective(sotto_comm* comm) {
  std::vector<float> x{1, -2, 3}, y(3);
  const sotto_buffer in = buffer(x), out = buffer(y);
  const uint64_t three[] = {3};
  sotto_parts parts = SOTTO_PARTS_INIT, both = SOTTO_PARTS_INIT;
  const auto check_copied = [&](const char* what) {
    require(x == y, what);
    y.assign(3, 0.0f);
  };
  OK(sotto_barrier(comm, nullptr, nullptr));
  OK(sotto_broadcast(comm, &in, &out, 1, 0, nullptr, nullptr));
  check_copied("broadcast");
  OK(sotto_all_gather(comm, &in, &out, 1, nullptr, nullptr));
  check_copied("all_gather");
  OK(sotto_reduce_scatter(comm, &in, &out, 1, nullptr, nullptr));
  check_copied("reduce_scatter");
  for (sotto_reduce_op op = SOTTO_REDUCE_SUM; op <= SOTTO_REDUCE_PROD; ++op) {
    const sotto_call call = call_with([&](auto& c) { c.reduce = op; });
    OK(sotto_all_reduce(comm, &in, &out, 1, &call, nullptr));
    check_copied("all_reduce");
    OK(sotto_reduce(comm, &in, &out, 1, 0, &call, nullptr));
    check_copied("reduce");
  }
  OK(sotto_gather(comm, &in, &out, 1, 0, nullptr, nullptr));
  check_copied("gather");
  OK(sotto_scatter(comm, &in, &out, 1, 0, nullptr, nullptr));
  check_copied("scatter");
  OK(sotto_all_to_all(comm, &in, &out, 1, nullptr, nullptr, nullptr));
  check_copied("all_to_all");
  both.in_counts = both.out_counts = three;
  OK(sotto_all_to_all(comm, &in, &out, 1, &both, nullptr, nullptr));
  check_copied("all_to_all with parts");
  parts.out_counts = three;
  OK(sotto_all_gather_v(comm, &in, &out, 1, &parts, nullptr, nullptr));
  check_copied("all_gather_v");
  std::swap(parts.in_counts, parts.out_counts);
  OK(sotto_reduce_scatter_v(comm, &in, &out, 1, &parts, nullptr, nullptr));
  check_copied("reduce_scatter_v");
  sotto_call call = SOTTO_CALL_INIT;
  OK(sotto_codec_create(comm, R"({"type": "int8"})", &in, 1, &call.codec));
  OK(sotto_all_reduce(comm, &in, &out, 1, &call, nullptr));
  OK(sotto_codec_destroy(call.codec));
}

// Trains, saves, and goes on from there with another optimizer to the same parameters.
void training(sotto_comm* comm, const std::string& type, const std::string& params) {
  const std::string json =
      R"({"optimizer": {"type": ")" + type + R"(", "params": {"lr": 0.01)" + params + "}}}";
  std::vector<float> weights(100, 1.0f), gradients(100);
  const auto create = [&] {
    sotto_param param = SOTTO_PARAM_INIT;
    param.param = buffer(weights);
    param.grad = buffer(gradients);
    sotto_optim* optim = nullptr;
    OK(sotto_optim_create(comm, json.c_str(), &param, 1, &optim));
    return optim;
  };
  const auto steps = [&](sotto_optim* optim, int first, int last) {
    for (int step = first; step < last; ++step) {
      for (size_t i = 0; i < gradients.size(); ++i)
        gradients[i] = static_cast<float>((i * 7 + static_cast<size_t>(step)) % 11) - 5;
      OK(sotto_optim_step(optim, nullptr, nullptr));
    }
  };
  sotto_optim* optim = create();
  steps(optim, 0, 4);
  const std::string state = read_all([&](char* buf, uint64_t cap, uint64_t* need) {
    return sotto_optim_state_export(optim, SOTTO_STATE_EXACT, buf, cap, need);
  });
  steps(optim, 4, 8);
  const std::vector<float> want = weights;
  OK(sotto_optim_destroy(optim));
  weights.assign(weights.size(), 0.0f);
  optim = create();
  OK(sotto_optim_state_import(optim, SOTTO_STATE_EXACT, state.data(), state.size()));
  steps(optim, 4, 8);
  require(weights == want, type + ": resumed");
  OK(sotto_optim_destroy(optim));
}

void everything(sotto_context* context, const sotto_comm_config* config) {
  sotto_comm *comm = nullptr, *part = nullptr;
  OK(sotto_comm_create(context, config, &comm));
  int32_t rank = -1, size = -1;
  OK(sotto_comm_rank(comm, &rank));
  OK(sotto_comm_size(comm, &size));
  require(rank == 0 && size == 1, "a world of one");
  every_collective(comm);
  OK(sotto_comm_split(comm, 0, 0, &part));
  every_collective(part);
  OK(sotto_comm_destroy(part));
  for (const char* type : {"SGD", "Adam", "AdamW", "Lamb"}) training(comm, type, "");
  for (const char* type : {"OneBitAdam", "OneBitLamb"})
    training(comm, type, R"(, "freeze_step": 3)");
  training(comm, "ZeroOneAdam", R"(, "var_freeze_step": 3)");
  OK(sotto_comm_destroy(comm));
}

// No process answers or listens there.
std::string closed_port() { return std::to_string(ReservedPort().number()); }

class WorldOfOne : public testing::TestWithParam<const char*> {};

TEST_P(WorldOfOne, UnderEveryLauncher) {
  const std::string port = closed_port();
  const std::string address = "tcp://127.0.0.1:" + port;
  const Variables master{{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}};
  std::vector<Variables> launchers = {
      {},
      {{"SOTTO_RANK", "0"}, {"SOTTO_WORLD_SIZE", "1"}},
      {{"SOTTO_RANK", "0"}, {"SOTTO_WORLD_SIZE", "1"}, {"SOTTO_RENDEZVOUS", address}},
      {{"SOTTO_RANK", "0"}, {"SOTTO_WORLD_SIZE", "1"}, {"SOTTO_RENDEZVOUS", "tcp://192.0.2.1:1"}},
      {{"RANK", "0"}, {"WORLD_SIZE", "1"}},
      {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}},
      {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}},
      {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}};
  launchers.push_back(launchers[4]);
  launchers.back().insert(launchers.back().end(), master.begin(), master.end());
  for (Variables& variables : launchers) {
    if (*GetParam() != '\0') variables.emplace_back("SOTTO_TRANSPORT", GetParam());
    const Scope scope(variables);
    sotto_context* context = new_context();
    EXPECT_EQ(run_ranks(1, [&](int) { everything(context, nullptr); }), "");
    OK(sotto_context_destroy(context));
  }
}

TEST_P(WorldOfOne, AsItsCallerSays) {
  const Scope scope(Variables{{"SOTTO_RENDEZVOUS", "tcp://192.0.2.1:1"}});
  sotto_context* context = new_context();
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  config.size = 1;
  config.transport = *GetParam() != '\0' ? GetParam() : nullptr;
  EXPECT_EQ(run_ranks(1, [&](int) { everything(context, &config); }), "");
  sotto_unique_id id;
  OK(sotto_unique_id_create(context, &id));
  config.id = &id;
  if (std::string(GetParam()) != "inproc") {  // the id is one of TCP
    EXPECT_EQ(run_ranks(1, [&](int) { everything(context, &config); }), "");
  }
  OK(sotto_context_destroy(context));
}

// sotto_comm_create is called by any thread.
TEST_P(WorldOfOne, ThreadsMakeCommsOfOneContext) {
  sotto_context* context = new_context();
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  config.size = 1;
  config.transport = *GetParam() != '\0' ? GetParam() : nullptr;
  const auto make = [&](int) {
    for (int i = 0; i < 300; ++i) {
      sotto_comm* comm = nullptr;
      OK(sotto_comm_create(context, &config, &comm));
      OK(sotto_comm_destroy(comm));
    }
  };
  EXPECT_EQ(run_ranks(4, make), "");
  OK(sotto_context_destroy(context));
}

// The transport of an id is made while another thread makes a comm.
TEST(WorldOfOneThreads, OneMakesIdsWhileAnotherMakesComms) {
  for (int round = 0; round < 200; ++round) {
    sotto_context* context = new_context();
    const auto make = [&](int rank) {
      sotto_unique_id id;
      sotto_comm* comm = nullptr;
      if (rank != 0) return OK(sotto_unique_id_create(context, &id));
      OK(sotto_comm_create(context, nullptr, &comm));
      OK(sotto_comm_destroy(comm));
    };
    ASSERT_EQ(run_ranks(2, make), "");
    OK(sotto_context_destroy(context));
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, WorldOfOne, testing::Values("", "inproc", "tcp"),
                         [](const auto& instance) {
                           return std::string(*instance.param == '\0' ? "auto" : instance.param);
                         });

}  // namespace
}  // namespace sotto::test
