// What a step asks of a device, counted on the fake runtime: the launches of an update do not grow
// with the number of tensors, and one copy brings the outcome to the host.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>

#include "tests/cuda/device_memory.h"
#include "tests/emulation/cuda/fake_cuda.h"

namespace sotto::test {
namespace {

constexpr size_t kTensors = 40;
constexpr uint64_t kGroups = 2;

struct Counts {
  uint64_t launches = 0;
  uint64_t copies_to_host = 0;
  uint64_t messages = 0;  // sent
};

uint64_t messages_sent(const Member& self) {
  sotto_comm_counters counters = SOTTO_COMM_COUNTERS_INIT;
  OK(sotto_comm_get_counters(self.comm, &counters));
  return counters.messages_sent;
}

// Of all ranks in the last of `steps` steps, over tensors whose groups take turns.
Counts of_step(const char* json, int32_t size, int steps) {
  Counts counts;
  std::atomic<uint64_t> messages{0};
  WorldOptions options;
  options.transport = "tcp";
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank)); };
  const std::string failure = run_world(size, options, [&](Member& self) {
    Tensors tensors(Where::kCuda, self.rank);
    std::vector<std::vector<float>> p, g;
    std::vector<sotto_param> params(kTensors);
    for (size_t t = 0; t < kTensors; ++t) {
      p.emplace_back(20 + t, 0.5f);
      g.emplace_back(20 + t, 0.25f);
    }
    for (size_t t = 0; t < kTensors; ++t) {
      params[t].struct_size = sizeof(sotto_param);
      params[t].group = static_cast<uint32_t>(t % kGroups);
      params[t].param = tensors.add(p[t]);
      params[t].grad = tensors.add(g[t]);
    }
    sotto_optim* optim = nullptr;
    OK(sotto_optim_create(self.comm, json, params.data(), params.size(), &optim));
    const sotto_call call = tensors.call();
    for (int step = 1; step < steps; ++step) OK(sotto_optim_step(optim, &call, nullptr));
    const auto together = [&](const std::function<void()>& on_first) {
      OK(sotto_barrier(self.comm, nullptr, nullptr));
      if (self.rank == 0) on_first();
      OK(sotto_barrier(self.comm, nullptr, nullptr));
    };
    together([&] { counts = {fake_cuda::launches(), fake_cuda::copies_to_host()}; });
    const uint64_t sent = messages_sent(self);
    OK(sotto_optim_step(optim, &call, nullptr));
    messages += messages_sent(self) - sent;
    together([&] {
      counts.launches = fake_cuda::launches() - counts.launches;
      counts.copies_to_host = fake_cuda::copies_to_host() - counts.copies_to_host;
    });
    OK(sotto_optim_destroy(optim));
  });
  EXPECT_EQ(failure, "");
  counts.messages = messages;
  return counts;
}

constexpr char kSgd[] = R"({"optimizer": {"type": "SGD", "params": {"lr": 0.01}}})";
constexpr char kAdam[] = R"({"optimizer": {"type": "Adam", "params": {"lr": 0.01}}})";
constexpr char kLamb[] =
    R"({"optimizer": {"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.1}}})";
constexpr char kOneBitAdam[] =
    R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 4}}})";
constexpr char kOneBitLamb[] = R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01,
    "freeze_step": 4, "weight_decay": 0.1}}})";

// Steps of the 1-bit types: full precision; compressed, and not the first of these.
constexpr int kWarmUp = 2, kCompressed = 6;

class StepCounts : public testing::TestWithParam<int32_t> {
 protected:
  // Launches of each rank.
  static uint64_t launches(const char* json, int steps) {
    return of_step(json, GetParam(), steps).launches / static_cast<uint64_t>(GetParam());
  }
};

// A step of SGD is the same but for its update, which is one launch.
TEST_P(StepCounts, LambHasThreeLaunchesForAGroup) {
  const uint64_t others = launches(kSgd, kWarmUp) - 1;
  EXPECT_EQ(launches(kLamb, kWarmUp) - others, 3 * kGroups);
  EXPECT_EQ(launches(kOneBitLamb, kWarmUp) - others, 3 * kGroups);
}

// A compressed step of 1-bit Adam is the same but for its update, which is two launches.
TEST_P(StepCounts, CompressedLambHasThreeLaunchesForAGroup) {
  const uint64_t others = launches(kOneBitAdam, kCompressed) - 2;
  EXPECT_EQ(launches(kOneBitLamb, kCompressed) - others, 3 * kGroups);
}

// Messages over TCP go by way of the host, with a copy each.
TEST_P(StepCounts, TheOutcomeIsOneCopy) {
  for (const char* json : {kAdam, kLamb, kOneBitAdam, kOneBitLamb}) {
    SCOPED_TRACE(json);
    const Counts counts = of_step(json, GetParam(), kCompressed);
    EXPECT_EQ(counts.copies_to_host - counts.messages, static_cast<uint64_t>(GetParam()));
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, StepCounts, testing::Values(1, 2),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace sotto::test
