// Overlaps of gradients on CUDA devices: what is ready is so behind streams, of which a bucket may
// have several, and the host waits for the end alone.
#include <fmt/core.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "tests/cuda/device_memory.h"
#include "tests/cuda/transports.h"
#include "tests/support/small_model.h"

namespace sotto::test {
namespace {

constexpr const char* kJson =
    R"({"first_bucket_bytes": 1000, "bucket_bytes": 30000, "unused": "zero"})";
const std::vector<uint64_t> kCounts{5000, 37, 9000, 1, 4000, 300};

// Gradients on a device, which are computed by copies from pinned memory on two streams.
class DeviceGradients {
 public:
  explicit DeviceGradients(int device) {
    CUDA_OK(cudaSetDevice(device));
    for (cudaStream_t& s : streams_) CUDA_OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    for (const uint64_t n : kCounts) {
      float *memory = nullptr, *source = nullptr, *back = nullptr;
      CUDA_OK(cudaMalloc(reinterpret_cast<void**>(&memory), n * 4));
      CUDA_OK(cudaHostAlloc(reinterpret_cast<void**>(&source), n * 4, cudaHostAllocDefault));
      CUDA_OK(cudaHostAlloc(reinterpret_cast<void**>(&back), n * 4, cudaHostAllocDefault));
      sources_.push_back(source);
      backs_.push_back(back);
      buffers.push_back({memory, n, SOTTO_FLOAT32, SOTTO_DEVICE_CUDA, device, 0});
    }
  }
  ~DeviceGradients() {
    for (cudaStream_t s : streams_) (void)cudaStreamSynchronize(s);
    for (size_t t = 0; t < buffers.size(); ++t) {
      (void)cudaFree(buffers[t].data);
      (void)cudaFreeHost(sources_[t]);
      (void)cudaFreeHost(backs_[t]);
    }
    for (cudaStream_t s : streams_) (void)cudaStreamDestroy(s);
  }
  DeviceGradients(const DeviceGradients&) = delete;
  DeviceGradients& operator=(const DeviceGradients&) = delete;

  cudaStream_t stream(size_t i) const { return streams_[i % 2]; }
  // Queued on one of the streams, which takes its time: the gradient's elements become x.
  void compute(uint64_t t, size_t on, float x) {
    CUDA_OK(cudaStreamSynchronize(stream(on)));  // the source is free
    std::fill_n(sources_[t], kCounts[t], x);
    const auto later = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(2)); };
    CUDA_OK(cudaLaunchHostFunc(stream(on), later, nullptr));
    CUDA_OK(cudaMemcpyAsync(buffers[t].data, sources_[t], kCounts[t] * 4, cudaMemcpyHostToDevice,
                            stream(on)));
  }
  std::vector<std::vector<float>> read() {
    for (uint64_t t = 0; t < kCounts.size(); ++t)
      CUDA_OK(cudaMemcpyAsync(backs_[t], buffers[t].data, kCounts[t] * 4, cudaMemcpyDeviceToHost,
                              stream(0)));
    CUDA_OK(cudaStreamSynchronize(stream(0)));
    std::vector<std::vector<float>> out;
    for (uint64_t t = 0; t < kCounts.size(); ++t)
      out.emplace_back(backs_[t], backs_[t] + kCounts[t]);
    return out;
  }
  void expect(float x, const std::string& what) {
    const std::vector<std::vector<float>> values = read();
    for (uint64_t t = 0; t < kCounts.size(); ++t) {
      for (const float v : values[t]) {
        require(v == x, what + ": gradient " + std::to_string(t) + " has " + std::to_string(v) +
                            " instead of " + std::to_string(x));
      }
    }
  }

  std::vector<sotto_buffer> buffers;

 private:
  cudaStream_t streams_[2] = {};
  std::vector<float*> sources_, backs_;
};

sotto_op* begin(sotto_overlap* overlap, const DeviceGradients& g) {
  const sotto_call call = call_with([&](sotto_call& c) { c.stream = g.stream(0); });
  sotto_op* op = nullptr;
  OK(sotto_overlap_begin(overlap, &call, &op));
  return op;
}

void end(sotto_overlap* overlap, sotto_op* op, const DeviceGradients& g) {
  OK(sotto_overlap_finish(overlap));
  OK(sotto_op_stream_wait(op, g.stream(0)));
  OK(sotto_op_wait(op, -1));
  OK(sotto_op_release(op));
}

void rounds(const Member& self) {
  DeviceGradients g(device_of(self.rank));
  sotto_overlap* overlap = nullptr;
  OK(sotto_overlap_create(self.comm, kJson, g.buffers.data(), g.buffers.size(), &overlap));
  for (size_t round = 0; round < 4; ++round) {
    sotto_op* op = begin(overlap, g);
    for (uint64_t t = kCounts.size(); t-- > 0;) {
      const size_t on = t + round * static_cast<size_t>(1 + self.rank);
      g.compute(t, on, static_cast<float>(self.rank) + static_cast<float>(round));
      OK(sotto_overlap_ready(overlap, &t, nullptr, 1, g.stream(on)));
    }
    end(overlap, op, g);
    g.expect(static_cast<float>(round) + 0.5f, "round " + std::to_string(round));
  }
  // On rank 1 nothing is used. What is queued before the round has not run yet.
  for (uint64_t t = 0; t < kCounts.size(); ++t) g.compute(t, 0, 8);
  sotto_op* op = begin(overlap, g);
  for (uint64_t t = 0; t < kCounts.size() && self.rank == 0; ++t)
    OK(sotto_overlap_ready(overlap, &t, nullptr, 1, g.stream(0)));
  end(overlap, op, g);
  g.expect(4, "unused");
  // One that is withdrawn, and the next.
  op = begin(overlap, g);
  const uint64_t some[] = {0, 5};
  OK(sotto_overlap_ready(overlap, some, nullptr, 2, g.stream(1)));
  if (self.rank == 1) {
    OK(sotto_overlap_withdraw(overlap, "enough"));
  } else {
    OK(sotto_overlap_finish(overlap));
  }
  FAILS(sotto_op_wait(op, -1), SOTTO_E_CANCELLED, "rank 1 has withdrawn: enough");
  OK(sotto_op_release(op));
  op = begin(overlap, g);
  for (uint64_t t = 0; t < kCounts.size(); ++t) {
    g.compute(t, t, 2);
    OK(sotto_overlap_ready(overlap, &t, nullptr, 1, g.stream(t)));
  }
  end(overlap, op, g);
  g.expect(2, "behind a withdrawal");
  OK(sotto_overlap_destroy(overlap));
}

TEST(CudaOverlaps, ComeAfterTheStreamsOfTheirGradients) {
  for (const char* transport : transports_under_test()) {
    WorldOptions options;
    options.transport = transport;
    options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(device_of(rank))); };
    EXPECT_EQ(run_world(2, options, [](Member& self) { rounds(self); }), "") << transport;
  }
}

// Collectives take their places between buckets, in the order in which ranks call and mark.
TEST(CudaOverlaps, LetCollectivesThrough) {
  for (const char* transport : transports_under_test()) {
    WorldOptions options;
    options.transport = transport;
    options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(device_of(rank))); };
    EXPECT_EQ(run_world(2, options,
                        [](Member& self) {
                          DeviceGradients g(device_of(self.rank)), other(device_of(self.rank));
                          sotto_overlap* overlap = nullptr;
                          OK(sotto_overlap_create(self.comm, kJson, g.buffers.data(),
                                                  g.buffers.size(), &overlap));
                          sotto_op* op = begin(overlap, g);
                          const sotto_call call =
                              call_with([&](sotto_call& c) { c.stream = other.stream(0); });
                          for (uint64_t t = kCounts.size(); t-- > 0;) {
                            g.compute(t, t, static_cast<float>(self.rank));
                            OK(sotto_overlap_ready(overlap, &t, nullptr, 1, g.stream(t)));
                            other.compute(t, 0, 3);
                            const sotto_buffer* const b = &other.buffers[t];
                            OK(sotto_all_reduce(self.comm, b, b, 1, &call, nullptr));
                          }
                          end(overlap, op, g);
                          g.expect(0.5f, "the overlap");
                          other.expect(6, "the collectives");
                          OK(sotto_overlap_destroy(overlap));
                        }),
              "")
        << transport;
  }
}

// Parameters on a device, and an optimizer of them.
struct DeviceOptimizer {
  DeviceGradients params, gradients;
  sotto_optim* optim = nullptr;

  DeviceOptimizer(const Member& self, const char* json)
      : params(device_of(self.rank)), gradients(device_of(self.rank)) {
    std::vector<sotto_param> specs;
    for (uint64_t t = 0; t < kCounts.size(); ++t) {
      params.compute(t, 0, 1);
      sotto_param& spec = specs.emplace_back() = SOTTO_PARAM_INIT;
      spec.param = params.buffers[t];
      spec.grad = gradients.buffers[t];
    }
    (void)params.read();
    OK(sotto_optim_create(self.comm, json, specs.data(), specs.size(), &optim));
  }
  ~DeviceOptimizer() { (void)sotto_optim_destroy(optim); }
};

void steps(const Member& self, const char* json) {
  DeviceOptimizer plain(self, json), late(self, json);
  sotto_overlap* overlap = nullptr;
  OK(sotto_overlap_create_step(late.optim, "{}", &overlap));
  for (size_t step = 0; step < 5; ++step) {
    const auto x = [&](uint64_t t) {
      return static_cast<float>(static_cast<uint64_t>(self.rank) + t + step) * 0.25f;
    };
    for (uint64_t t = 0; t < kCounts.size(); ++t) plain.gradients.compute(t, 0, x(t));
    const sotto_call call = call_with([&](sotto_call& c) { c.stream = plain.gradients.stream(0); });
    sotto_op* op = nullptr;
    OK(sotto_optim_step(plain.optim, &call, &op));
    OK(sotto_op_wait(op, -1));
    OK(sotto_op_release(op));
    op = begin(overlap, late.gradients);
    for (uint64_t t = kCounts.size(); t-- > 0;) {
      late.gradients.compute(t, t, x(t));
      OK(sotto_overlap_ready(overlap, &t, nullptr, 1, late.gradients.stream(t)));
    }
    end(overlap, op, late.gradients);
    require(plain.params.read() == late.params.read(), "step " + std::to_string(step));
  }
  OK(sotto_overlap_destroy(overlap));
}

void expect_same_steps(const std::string& optimizer, const std::string& more) {
  const std::string json = "{\"optimizer\": " + optimizer + more + "}";
  for (const char* transport : transports_under_test()) {
    WorldOptions options;
    options.transport = transport;
    options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(device_of(rank))); };
    EXPECT_EQ(run_world(2, options, [&](Member& self) { steps(self, json.c_str()); }), "")
        << json << " over " << transport;
  }
}

constexpr const char* kAdamW = R"({"type": "AdamW", "params": {"lr": 0.1}})";

TEST(CudaOverlaps, StepsComeAfterTheStreamsOfTheirGradients) {
  for (const char* optimizer : kOptimizers) expect_same_steps(optimizer, "");
  expect_same_steps(kAdamW, R"(, "gradient_clipping": 9)");
  for (const char* type : {"OneBitAdam", "OneBitLamb"}) {
    expect_same_steps(
        fmt::format(R"({{"type": "{}", "params": {{"lr": 0.1, "freeze_step": 2}}}})", type),
        R"(, "sotto": {"granularity": "bucket", "bucket_elements": 8192})");
  }
}

TEST(CudaOverlaps, StepsWithCodecsComeAfterTheStreamsOfTheirGradients) {
  for (const char* codec :
       {R"("onebit", "granularity": "bucket", "bucket_elements": 8192)", R"("onebit")", R"("int8")",
        R"("int4")", R"("bf16")", R"("fp16")", R"("topk")"}) {
    expect_same_steps(kAdamW,
                      fmt::format(R"(, "sotto": {{"gradient_codec": {{"type": {}}}}})", codec));
  }
}

// A stream that stands still until another rank comes holds up no lane that the operation needs
// for which it waits.
TEST(CudaOverlaps, WaitOffTheLanesForAStreamThatIsBlocked) {
  setenv("SOTTO_STREAM_BLOCK", "1", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  std::atomic<bool> rank_1_comes{false};
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        CUDA_OK(cudaSetDevice(device_of(self.rank)));
                        DeviceGradients g(device_of(self.rank)), other(device_of(self.rank));
                        sotto_overlap* overlap = nullptr;
                        OK(sotto_overlap_create(self.comm, kJson, g.buffers.data(),
                                                g.buffers.size(), &overlap));
                        for (uint64_t t = 0; t < kCounts.size(); ++t) {
                          g.compute(t, 1, 1);
                          other.compute(t, 1, 1);
                        }
                        CUDA_OK(cudaStreamSynchronize(g.stream(1)));
                        CUDA_OK(cudaStreamSynchronize(other.stream(1)));
                        sotto_op* op = begin(overlap, g);
                        while (self.rank == 1 && !rank_1_comes) std::this_thread::yield();
                        const sotto_call call = call_with([&](sotto_call& c) {
                          c.stream = other.stream(0);
                          c.timeout_us = 5'000'000;
                        });
                        sotto_op* sum = nullptr;
                        OK(sotto_all_reduce(self.comm, other.buffers.data(), other.buffers.data(),
                                            other.buffers.size(), &call, &sum));
                        if (self.rank == 0) OK(sotto_op_stream_wait(sum, g.stream(1)));
                        for (uint64_t t = 0; t < kCounts.size(); ++t)
                          OK(sotto_overlap_ready(overlap, &t, nullptr, 1, g.stream(1)));
                        // The buckets' events are seen before the other rank comes.
                        std::this_thread::sleep_for(std::chrono::milliseconds(50));
                        rank_1_comes = true;
                        OK(sotto_op_wait(sum, -1));
                        OK(sotto_op_release(sum));
                        end(overlap, op, g);
                        g.expect(1, "the overlap");
                        other.expect(2, "the sum");
                        OK(sotto_overlap_destroy(overlap));
                      }),
            "");
  for (const char* name : {"SOTTO_STREAM_BLOCK", "CUDA_MODULE_LOADING"}) unsetenv(name);
}

TEST(CudaOverlaps, RefuseAStreamThatIsCaptured) {
  EXPECT_EQ(run_world(1, {},
                      [](Member& self) {
                        DeviceGradients g(1);
                        sotto_overlap* overlap = nullptr;
                        OK(sotto_overlap_create(self.comm, kJson, g.buffers.data(),
                                                g.buffers.size(), &overlap));
                        sotto_op* op = begin(overlap, g);
                        const uint64_t zero[] = {0};
                        CUDA_OK(cudaStreamBeginCapture(g.stream(1), cudaStreamCaptureModeRelaxed));
                        FAILS(sotto_overlap_ready(overlap, zero, nullptr, 1, g.stream(1)),
                              SOTTO_E_INVALID_STATE, "captur");
                        cudaGraph_t graph = nullptr;
                        CUDA_OK(cudaStreamEndCapture(g.stream(1), &graph));
                        (void)cudaGraphDestroy(graph);
                        OK(sotto_overlap_ready(overlap, zero, nullptr, 1, g.stream(1)));
                        end(overlap, op, g);
                        OK(sotto_overlap_destroy(overlap));
                      }),
            "");
}

}  // namespace
}  // namespace sotto::test
