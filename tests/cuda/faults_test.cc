// On the fake CUDA runtime: every wait between streams is needed, any call may fail, steps neither
// allocate nor hold up the host, and without a driver the library says so.
//
// Rank 0 has its tensors on a CUDA device, the others have theirs on the host, so that calls of the
// runtime are those of one rank.
#include <map>

#include "tests/cuda/device_memory.h"
#include "tests/support/fake_cuda/fake_cuda.h"

namespace sotto::test {
namespace {

constexpr uint64_t kCounts[] = {1000, 17, 9000};

struct Model {
  Tensors tensors;
  std::vector<float> p[3], g[3];
  std::vector<sotto_param> params = std::vector<sotto_param>(3);

  explicit Model(const Member& self) : tensors(self.rank == 0 ? Where::kCuda : Where::kHost) {
    for (size_t t = 0; t < 3; ++t) {
      for (uint64_t i = 0; i < kCounts[t]; ++i)
        p[t].push_back(0.01f * static_cast<float>(i % 97) - 0.3f);
      g[t].resize(kCounts[t]);
      params[t].struct_size = sizeof(sotto_param);
      params[t].param = tensors.add(p[t]);
      params[t].grad = tensors.add(g[t]);
    }
    tensors.sync();
  }
  // What the caller queues before a step: gradients of this step, on the caller's stream.
  void queue_gradients(int rank, int step) {
    tensors.sync();
    for (size_t t = 0; t < 3; ++t) {
      for (size_t i = 0; i < g[t].size(); ++i) {
        g[t][i] =
            static_cast<float>(
                (i * 7 + static_cast<size_t>(rank) * 5 + static_cast<size_t>(step) * 3) % 41) -
            20.0f;
      }
    }
    tensors.upload_behind(g[0], g[1], g[2]);
  }
};

constexpr const char* kConfigs[] = {
    R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 1.0})",
    R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "sotto": {"gradient_codec": {"type": "onebit", "granularity": "bucket",
                                     "bucket_elements": 8192}}})",
    R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 2}}})",
};

// Steps of a training; the parameters at the end, of rank 0.
std::string train(const char* json, int steps,
                  const std::function<void(Member&, sotto_optim*, Model&, int step)>& do_step) {
  std::string result;
  WorldOptions options;
  options.timeout_us = 5'000'000;
  const std::string failure = run_world(2, options, [&](Member& self) {
    Model model(self);
    sotto_optim* optim = nullptr;
    OK(sotto_optim_create(self.comm, json, model.params.data(), 3, &optim));
    for (int step = 0; step < steps; ++step) do_step(self, optim, model, step);
    OK(sotto_optim_destroy(optim));
    model.tensors.download();
    if (self.rank == 0) result = bytes_of(model.p[0]) + bytes_of(model.p[1]) + bytes_of(model.p[2]);
  });
  return failure.empty() ? result : failure;
}

void step_on_stream(Member& self, sotto_optim* optim, Model& model, int step) {
  model.queue_gradients(self.rank, step);
  const sotto_call call = model.tensors.call();
  sotto_op* op = nullptr;
  OK(sotto_optim_step(optim, &call, &op));
  if (self.rank == 0) OK(sotto_op_stream_wait(op, model.tensors.stream()));
  OK(sotto_op_wait(op, -1));
  OK(sotto_op_release(op));
}

class CudaFaults : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    fake_cuda::clear_faults();
    fake_cuda::configure({});
  }
  void TearDown() override {
    fake_cuda::clear_faults();
    fake_cuda::drain();
    EXPECT_EQ(fake_cuda::live(), fake_cuda::Live{}) << fake_cuda::live().text();
  }
  static const char* json() { return kConfigs[GetParam()]; }
};

// A wait that can be left out is none that should be there. Random delays of the streams make the
// difference show in some run.
TEST_P(CudaFaults, EveryWaitOfAStreamIsNeeded) {
  constexpr int kSteps = 3;
  const std::string want = train(json(), kSteps, step_on_stream);
  ASSERT_EQ(want.size(), 4 * (kCounts[0] + kCounts[1] + kCounts[2])) << want;
  fake_cuda::clear_faults();
  const std::string again = train(json(), kSteps, step_on_stream);
  ASSERT_EQ(again, want);
  const uint64_t waits = fake_cuda::waits();
  ASSERT_GT(waits, 0u);
  std::string unneeded;
  for (uint64_t k = 0; k < waits; ++k) {
    bool shows = false;
    for (uint64_t seed = 1; seed <= 8 && !shows; ++seed) {
      fake_cuda::Options options;
      options.max_delay_us = 2000;
      options.seed = seed;
      fake_cuda::clear_faults();
      fake_cuda::configure(options);
      fake_cuda::drop_wait(k);
      shows = train(json(), kSteps, step_on_stream) != want;
    }
    if (!shows) unneeded += std::to_string(k) + " ";
  }
  EXPECT_EQ(unneeded, "") << "of " << waits << " waits";
}

// The k-th call of a step fails: the step ends with an error that names the call, nothing is left
// behind, and the next group works.
TEST_P(CudaFaults, AnyCallMayFail) {
  constexpr int kSteps = 3;
  const std::string want = train(json(), kSteps, step_on_stream);
  for (uint64_t k = 0;; ++k) {
    SCOPED_TRACE("call " + std::to_string(k));
    ASSERT_LT(k, 5000u);
    std::string text[2], call_that_failed;
    const std::string broken = run_world(2, {}, [&](Member& self) {
      Model model(self);
      sotto_optim* optim = nullptr;
      OK(sotto_optim_create(self.comm, json(), model.params.data(), 3, &optim));
      sotto_status status = SOTTO_OK;
      for (int step = 0; step < kSteps && status == SOTTO_OK; ++step) {
        model.queue_gradients(self.rank, step);
        model.tensors.sync();
        OK(sotto_barrier(self.comm, nullptr, nullptr));
        if (self.rank == 0 && step == kSteps - 1) fake_cuda::fail_call(k);
        const sotto_call call = model.tensors.call();
        status = sotto_optim_step(optim, &call, nullptr);
      }
      if (status != SOTTO_OK) text[self.rank] = sotto_last_error();
      if (self.rank == 0) {
        call_that_failed = fake_cuda::failed_call();
        fake_cuda::clear_faults();
        // A call that was refused has failed nobody else.
        if (status != SOTTO_OK) OK(sotto_comm_abort(self.comm, "the step has failed"));
      }
      OK(sotto_optim_destroy(optim));
    });
    EXPECT_EQ(broken, "");
    EXPECT_EQ(fake_cuda::live(), fake_cuda::Live{}) << fake_cuda::live().text();
    if (call_that_failed.empty()) break;  // the step has no more calls
    EXPECT_NE(text[0].find(call_that_failed), std::string::npos)
        << call_that_failed << ": " << text[0];
  }
  EXPECT_EQ(train(json(), kSteps, step_on_stream), want);
}

// From the second step of a kind on.
TEST_P(CudaFaults, StepsNeitherAllocateNorWait) {
  const auto counted = [] {
    std::map<std::string, uint64_t> counts;
    for (const char* call : {"cudaMalloc", "cudaMallocAsync", "cudaFree", "cudaFreeAsync",
                             "cudaHostAlloc", "cudaFreeHost", "cudaEventCreateWithFlags",
                             "cudaStreamSynchronize", "cudaDeviceSynchronize"})
      counts[call] = fake_cuda::calls(call);
    counts["host waits"] = fake_cuda::host_waits();
    return counts;
  };
  const std::string result =
      train(json(), 8, [&](Member& self, auto* optim, Model& model, int step) {
        model.queue_gradients(self.rank, step);
        model.tensors.sync();
        const auto before = counted();
        const sotto_call call = model.tensors.call();
        sotto_op* op = nullptr;
        OK(sotto_optim_step(optim, &call, &op));
        if (self.rank == 0) OK(sotto_op_stream_wait(op, model.tensors.stream()));
        OK(sotto_op_wait(op, -1));
        OK(sotto_op_release(op));
        if (self.rank == 0 && step >= 5) require(counted() == before, "a step allocates or waits");
        OK(sotto_barrier(self.comm, nullptr, nullptr));
      });
  EXPECT_EQ(result.size(), 4 * (kCounts[0] + kCounts[1] + kCounts[2])) << result;
}

INSTANTIATE_TEST_SUITE_P(Configurations, CudaFaults, ::testing::Range(0, 3));

TEST(CudaMissing, TheLibrarySaysWhyAndGoesOnWithoutIt) {
  fake_cuda::Options options;
  options.driver = false;
  fake_cuda::configure(options);
  EXPECT_EQ(
      run_world(
          1, {},
          [](Member& self) {
            std::vector<float> a(8, 1.0f);
            sotto_buffer b = buffer(a);
            OK(sotto_all_reduce(self.comm, &b, &b, 1, nullptr, nullptr));
            b.device_type = SOTTO_DEVICE_CUDA;
            FAILS(sotto_all_reduce(self.comm, &b, &b, 1, nullptr, nullptr), SOTTO_E_DEVICE, "in[0]",
                  "there is no cuda:0", "cudaGetDeviceCount", "cudaErrorInsufficientDriver");
            const std::string report = read_all([&](char* buf, uint64_t cap, uint64_t* out_len) {
              return sotto_context_report(self.context, nullptr, buf, cap, out_len);
            });
            require(report.find("no CUDA device: cudaGetDeviceCount") != std::string::npos, report);
          }),
      "");
  fake_cuda::configure({});
}

}  // namespace
}  // namespace sotto::test
