// Waiting at the C ABI: time-outs, and several operations at once.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "tests/ranks/capi_support.h"

namespace sotto::test {
namespace {

// Negative means no limit, wherever a time-out is taken.
TEST(CapiWaits, NegativeTimeOuts) {
  setenv("SOTTO_TIMEOUT_US", "-1", 1);
  sotto_context_config context_config = SOTTO_CONTEXT_CONFIG_INIT;
  context_config.no_progress_thread = 1;
  sotto_context* context = nullptr;
  OK(sotto_context_create(&context_config, &context));
  unsetenv("SOTTO_TIMEOUT_US");
  for (const int64_t timeout_us : {int64_t{0}, int64_t{-1}, INT64_MIN}) {
    sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
    config.size = 1;
    config.timeout_us = timeout_us;
    sotto_comm* comm = nullptr;
    OK(sotto_comm_create(context, &config, &comm));
    const std::string report = read_all([&](char* buf, uint64_t cap, uint64_t* need) {
      return sotto_comm_report(comm, "all", buf, cap, need);
    });
    EXPECT_NE(report.find("\"timeout_us\":-"), std::string::npos) << report;
    const sotto_call call = call_with([](auto& c) { c.timeout_us = -5; });
    sotto_op* op = nullptr;
    OK(sotto_barrier(comm, &call, &op));
    OK(sotto_op_wait(op, INT64_MIN));
    uint64_t index = 9;
    OK(sotto_op_wait_any(&op, 1, -7, &index));
    OK(sotto_op_release(op));
    // The other thread's calls are what happens; the first may be over before the poll begins.
    std::atomic<bool> polled{false};
    std::thread other([&] {
      while (!polled) OK(sotto_barrier(comm, nullptr, nullptr));
    });
    OK(sotto_context_poll(context, -1));
    polled = true;
    other.join();
    OK(sotto_comm_destroy(comm));
  }
  OK(sotto_context_destroy(context));
}

// Rank 1 takes part in the first two barriers at once, in the third when it is told to.
TEST(CapiWaits, All) {
  std::atomic<bool> go{false};
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        std::vector<sotto_op*> ops(5, nullptr);
                        for (const size_t i : {0, 2, 3}) {
                          if (self.rank == 1 && i == 3) {
                            while (!go) std::this_thread::yield();
                          }
                          OK(sotto_barrier(self.comm, nullptr, &ops[i]));
                        }
                        if (self.rank == 0) {
                          // Time over: nothing changes, and what has completed stays so.
                          OK(sotto_op_wait(ops[2], -1));
                          for (const int64_t timeout_us : {0, 20'000}) {
                            require(sotto_op_wait_all(ops.data(), ops.size(), timeout_us) ==
                                        SOTTO_IN_PROGRESS,
                                    "wait_all before all have completed");
                          }
                          OK(sotto_op_test(ops[0]));
                          require(sotto_op_test(ops[3]) == SOTTO_IN_PROGRESS, "test");
                          go = true;
                        }
                        OK(sotto_op_wait_all(ops.data(), ops.size(), -1));
                        for (sotto_op* op : ops) {
                          if (op != nullptr) OK(sotto_op_test(op));
                        }
                        OK(sotto_op_wait_all(ops.data(), ops.size(), 0));
                        OK(sotto_op_wait_all(nullptr, 0, 0));
                        const std::vector<sotto_op*> none(3, nullptr);
                        OK(sotto_op_wait_all(none.data(), none.size(), -1));
                        for (sotto_op* op : ops) OK(sotto_op_release(op));
                      }),
            "");
}

// A step with gradients that are no numbers fails alone; what is beside it completes.
TEST(CapiWaits, AllTellsTheFirstThatFailed) {
  EXPECT_EQ(
      run_world(2, {},
                [](Member& self) {
                  std::vector<float> weights(64, 1.0f), gradients(64, std::nanf(""));
                  sotto_param param = SOTTO_PARAM_INIT;
                  param.param = buffer(weights);
                  param.grad = buffer(gradients);
                  sotto_optim* optim = nullptr;
                  OK(sotto_optim_create(self.comm,
                                        R"({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}})",
                                        &param, 1, &optim));
                  sotto_op* ops[3] = {};
                  OK(sotto_barrier(self.comm, nullptr, &ops[0]));
                  OK(sotto_optim_step(optim, nullptr, &ops[1]));
                  OK(sotto_barrier(self.comm, nullptr, &ops[2]));
                  FAILS(sotto_op_wait_all(ops, 3, -1), SOTTO_E_NONFINITE, "ops[1]");
                  OK(sotto_op_test(ops[2]));
                  for (sotto_op* op : ops) OK(sotto_op_release(op));
                  FAILS(sotto_op_wait_all(ops, 3, -1), SOTTO_E_INVALID_ARGUMENT, "ops[0]",
                        "has been released before");
                  FAILS(sotto_op_wait_all(nullptr, 2, 0), SOTTO_E_INVALID_ARGUMENT, "ops is NULL");
                  OK(sotto_optim_destroy(optim));
                }),
      "");
}

TEST(CapiWaits, AllOfOneContext) {
  sotto_context* contexts[2] = {new_context(), new_context()};
  sotto_comm* comms[2] = {};
  sotto_op* ops[2] = {};
  for (int i = 0; i < 2; ++i) {
    sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
    config.size = 1;
    OK(sotto_comm_create(contexts[i], &config, &comms[i]));
    OK(sotto_barrier(comms[i], nullptr, &ops[i]));
  }
  FAILS(sotto_op_wait_all(ops, 2, -1), SOTTO_E_INVALID_ARGUMENT, "ops[1]", "another context");
  for (int i = 0; i < 2; ++i) {
    OK(sotto_op_wait_all(&ops[i], 1, -1));
    OK(sotto_op_release(ops[i]));
    OK(sotto_comm_destroy(comms[i]));
    OK(sotto_context_destroy(contexts[i]));
  }
}

}  // namespace
}  // namespace sotto::test
