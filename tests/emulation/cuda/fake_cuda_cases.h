// What the tests of the fake CUDA runtime share: calls that have to succeed, and two kernels.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/cuda/kernel_registry.h"

#define CUDA_OK(call) ASSERT_EQ(call, cudaSuccess)

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kTsan = true;
#else
inline constexpr bool kTsan = false;
#endif

namespace sotto::fake_cuda {

// out[i] = in[i] + x. A launch is one "thread" that runs the whole grid.
inline void add_kernel(float* out, const float* in, float x, int n) {
  for (int i = 0; i < n; ++i) out[i] = in[i] + x;
}

inline Job bind_add(const void*, void** args, const LaunchShape&) {
  auto* out = *static_cast<float**>(args[0]);
  const auto* in = *static_cast<const float**>(args[1]);
  const float x = *static_cast<float*>(args[2]);
  const int n = *static_cast<int*>(args[3]);
  return [=] { add_kernel(out, in, x, n); };
}

inline cudaError_t launch_add(float* out, const float* in, float x, int n, cudaStream_t stream) {
  const auto* function = reinterpret_cast<const void*>(&add_kernel);
  fake_cuda_register_kernel(function, &bind_add);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  config.stream = stream;
  void* args[] = {&out, &in, &x, &n};
  return cudaLaunchKernelExC(&config, function, args);
}

// Every test begins and ends with nothing alive.
class FakeCuda : public testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    clear_faults();
    configure({});
  }
  void TearDown() override {
    drain();
    clear_faults();
    EXPECT_EQ(live(), Live{}) << live().text();
  }

  static cudaStream_t stream() {
    cudaStream_t s = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
    return s;
  }
  static cudaEvent_t event() {
    cudaEvent_t e = nullptr;
    EXPECT_EQ(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), cudaSuccess);
    return e;
  }
  static float* floats(size_t n) {
    void* p = nullptr;
    EXPECT_EQ(cudaMalloc(&p, n * sizeof(float)), cudaSuccess);
    return static_cast<float*>(p);
  }
  static float* pinned(size_t n) {
    void* p = nullptr;
    EXPECT_EQ(cudaMallocHost(&p, n * sizeof(float)), cudaSuccess);
    return static_cast<float*>(p);
  }
  static std::vector<float> read(const float* at, size_t n, cudaStream_t s) {
    std::vector<float> out(n);
    EXPECT_EQ(cudaMemcpyAsync(out.data(), at, n * sizeof(float), cudaMemcpyDeviceToHost, s),
              cudaSuccess);
    return out;
  }
};

}  // namespace sotto::fake_cuda
