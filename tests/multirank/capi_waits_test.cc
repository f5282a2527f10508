// Waiting at the C ABI: time-outs, and several operations at once.
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "tests/multirank/capi_support.h"

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
    std::thread other([&] { OK(sotto_barrier(comm, nullptr, nullptr)); });
    OK(sotto_context_poll(context, -1));  // the other thread's call is what happens
    other.join();
    OK(sotto_comm_destroy(comm));
  }
  OK(sotto_context_destroy(context));
}

}  // namespace
}  // namespace sotto::test
