// The fake CUDA runtime catches what a GPU would let pass: planted bugs, faults, dropped waits.
#include <cuda.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/emulation/cuda/fake_cuda_cases.h"

namespace sotto::fake_cuda {
namespace {

constexpr int kN = 1000;

class FakeCudaDeathTest : public FakeCuda {};

TEST_F(FakeCudaDeathTest, HandlesThatDoNotExist) {
  cudaStream_t s = stream();
  cudaEvent_t e = event();
  CUDA_OK(cudaStreamDestroy(s));
  CUDA_OK(cudaEventDestroy(e));
  EXPECT_DEATH(cudaStreamSynchronize(s), "cudaStreamSynchronize: a stream that was never made");
  EXPECT_DEATH(cudaStreamDestroy(s), "a stream that was never made or has been destroyed");
  EXPECT_DEATH(cudaEventQuery(e), "an event that was never made or has been destroyed");
  EXPECT_DEATH(cudaEventDestroy(e), "an event that was never made or has been destroyed");
  EXPECT_DEATH(cudaStreamSynchronize(cudaStreamPerThread), "per-thread default stream");
}

TEST_F(FakeCudaDeathTest, MemoryThatIsNotAlive) {
  float* a = floats(kN);
  cudaStream_t s = stream();
  EXPECT_DEATH(cudaFree(a + 1), "cudaFree of an address.*offset 4 of 4000 bytes of device memory");
  EXPECT_DEATH(cudaFreeHost(a), "cudaFreeHost of 4000 bytes of device memory");
  EXPECT_DEATH(
      {
        hold();
        cudaMemsetAsync(a, 0, 4, s);
        cudaFreeAsync(a, s);
        cudaFreeAsync(a, s);
      },
      "cudaFreeAsync of 4000 bytes of device memory .device 0., which cudaFreeAsync has freed");
  EXPECT_DEATH(
      {
        hold();
        cudaMemsetAsync(a, 0, 4, s);
        cudaFreeAsync(a, s);
        cudaMemsetAsync(a, 0, 4, s);
      },
      "cudaMemsetAsync of 4 bytes: in 4000 bytes of device memory .device 0., which cudaFreeAsync");
  CUDA_OK(cudaFree(a));
  EXPECT_DEATH(cudaFree(a), "within 4000 bytes of device memory .device 0. that have been freed");
  EXPECT_DEATH(cudaMemsetAsync(a, 0, 4, s),
               "of memory that the device cannot reach: within 4000 bytes");
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCudaDeathTest, CopiesOutOfRangeOrOfTheWrongKind) {
  float *a = floats(10), *b = floats(10), *host = pinned(10);
  cudaStream_t s = stream();
  std::vector<float> pageable(10);
  const auto copy = [&](void* d, const void* p, size_t n, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(d, p, n, kind, s);
  };
  EXPECT_DEATH(copy(a, pageable.data(), 44, cudaMemcpyHostToDevice),
               "44 bytes at offset 0 runs out of 40 bytes of device memory");
  EXPECT_DEATH(copy(a + 1, b, 40, cudaMemcpyDeviceToDevice), "at offset 4 runs out of 40 bytes");
  EXPECT_DEATH(copy(a, b, 40, cudaMemcpyHostToDevice),
               "the kind of the copy says host memory, but it is in 40 bytes of device memory");
  EXPECT_DEATH(copy(a, host, 40, cudaMemcpyDeviceToDevice), "says device memory, but it is in 40");
  EXPECT_DEATH(copy(a, pageable.data(), 40, cudaMemcpyDeviceToDevice), "not in live device memory");
  EXPECT_DEATH(copy(a, a + 2, 16, cudaMemcpyDeviceToDevice), "overlaps their source");
  CUDA_OK(cudaFree(a));
  CUDA_OK(cudaFree(b));
  CUDA_OK(cudaFreeHost(host));
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCudaDeathTest, KernelsOutOfBounds) {
  cudaStream_t s = stream();
  float *a = floats(1024), *b = floats(1024);  // 4096 bytes: the guard page follows at once
  EXPECT_DEATH(
      {
        launch_add(a, b, 1.0f, 1025, s);
        drain();
      },
      kTsan ? "" : "bytes past the end of 4096 bytes of device memory|SEGV");
  EXPECT_DEATH(
      {
        float* c = floats(10);  // 24 bytes of canary follow
        launch_add(c, b, 1.0f, 11, s);
        drain();
        cudaFree(c);
      },
      "wrote behind the end of 40 bytes of device memory");
  EXPECT_DEATH(
      {
        float* c = floats(10);
        launch_add(c - 1, b, 1.0f, 2, s);
        drain();
        cudaFree(c);
      },
      "wrote in front of 40 bytes of device memory");
  CUDA_OK(cudaFree(a));
  CUDA_OK(cudaFree(b));
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCudaDeathTest, TheHostCannotReadWhatItGuards) {
  configure({.guard_host = true});
  float* a = floats(4);
  cudaStream_t s = stream();
  CUDA_OK(cudaMemsetAsync(a, 0, 16, s));  // the device can
  EXPECT_EQ(read(a, 4, s), std::vector<float>(4, 0.0f));
  EXPECT_DEATH(static_cast<volatile float*>(a)[0] = 1.0f,
               kTsan ? "" : "access to offset 0 of 16 bytes of device memory|SEGV");
  CUDA_OK(cudaFree(a));
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCudaDeathTest, CallsFromAHostFunction) {
  cudaStream_t s = stream();
  EXPECT_DEATH(
      {
        cudaLaunchHostFunc(
            s, [](void* p) { cudaStreamQuery(static_cast<cudaStream_t>(p)); }, s);
        drain();
      },
      "cudaStreamQuery is called from a host function");
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCudaDeathTest, WorkForAnotherDevice) {
  cudaStream_t s = stream();
  cudaEvent_t e = event();
  CUDA_OK(cudaSetDevice(1));
  cudaStream_t other = stream();
  CUDA_OK(cudaSetDevice(0));
  float* a = floats(4);
  EXPECT_DEATH(launch_add(a, a, 1.0f, 4, other),
               "cudaLaunchKernelExC on a stream of device 1 while device 0 is current");
  EXPECT_DEATH(cudaEventRecord(e, other), "an event of device 0 on a stream of device 1");
  CUDA_OK(cudaFree(a));
  CUDA_OK(cudaEventDestroy(e));
  CUDA_OK(cudaStreamDestroy(s));
  CUDA_OK(cudaStreamDestroy(other));
}

TEST_F(FakeCudaDeathTest, KernelsThatNobodyEmulates) {
  cudaLaunchConfig_t config = {};
  config.gridDim = config.blockDim = dim3(1);
  EXPECT_DEATH(cudaLaunchKernelExC(&config, &config, nullptr),
               "a function that nobody has registered");
}

// What may wait until the device stands still, while a stream of it waits for a word.
TEST_F(FakeCudaDeathTest, CallsThatMayWaitForAHeldStream) {
  void* entry = nullptr;
  CUDA_OK(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &entry, 12000, cudaEnableDefault,
                                           nullptr));
  const auto wait_value =
      reinterpret_cast<CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned)>(entry);
  float *a = floats(kN), *word = pinned(1);
  *word = 0;
  cudaStream_t held = stream(), free = stream();
  ASSERT_EQ(wait_value(held, reinterpret_cast<CUdeviceptr>(word), 1, CU_STREAM_WAIT_VALUE_GEQ),
            CUDA_SUCCESS);
  EXPECT_DEATH(launch_add(a, a, 1, kN, free),
               "cudaLaunchKernelExC of a kernel that is not loaded, while a stream of device 0");
  cudaFuncAttributes attributes;
  fake_cuda_register_kernel(reinterpret_cast<const void*>(&add_kernel), &bind_add);
  CUDA_OK(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&add_kernel)));
  CUDA_OK(launch_add(a, a, 1, kN, free));
  CUDA_OK(cudaStreamSynchronize(free));
  EXPECT_TRUE(waits_behind_blocks().empty());
  float* more = pinned(1);
  cudaMemPool_t pool = nullptr;
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  CUDA_OK(cudaMemPoolCreate(&pool, &properties));
  CUDA_OK(cudaMemPoolTrimTo(pool, 0));
  CUDA_OK(cudaMemPoolDestroy(pool));
  EXPECT_EQ(waits_behind_blocks(),
            (std::vector<std::string>{"cudaMallocHost", "cudaMemPoolCreate", "cudaMemPoolTrimTo",
                                      "cudaMemPoolDestroy"}));
  std::atomic_ref(*reinterpret_cast<uint32_t*>(word)).store(1);
  for (float* memory : {word, more}) CUDA_OK(cudaFreeHost(memory));
  CUDA_OK(cudaFree(a));
  EXPECT_EQ(waits_behind_blocks().size(), 4u) << "the word has its value";
  for (cudaStream_t s : {held, free}) CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCudaDeathTest, TheDefaultStreamCanBeForbidden) {
  configure({.forbid_default_stream = true});
  EXPECT_DEATH(cudaStreamSynchronize(nullptr), "the default stream is used");
}

// ---- Faults ----

TEST_F(FakeCuda, AnyCallCanFailAndNamesItself) {
  cudaStream_t s = stream();
  void* p = nullptr;
  fail_call(1, cudaErrorMemoryAllocation);
  CUDA_OK(cudaStreamSynchronize(s));
  EXPECT_EQ(failed_call(), "");
  EXPECT_EQ(cudaMallocAsync(&p, 16, s), cudaErrorMemoryAllocation);
  EXPECT_EQ(failed_call(), "cudaMallocAsync");
  CUDA_OK(cudaMallocAsync(&p, 16, s));  // once
  CUDA_OK(cudaFreeAsync(p, s));
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCuda, GivingBackWorksAlsoWhenItFails) {
  cudaStream_t s = stream();
  cudaEvent_t e = event();
  float *a = floats(4), *b = floats(4), *c = pinned(4);
  const auto failing = [](auto call, const char* name) {
    fail_call(0);
    EXPECT_EQ(call(), cudaErrorUnknown);
    EXPECT_EQ(failed_call(), name);
  };
  failing([&] { return cudaFree(a); }, "cudaFree");
  failing([&] { return cudaFreeAsync(b, s); }, "cudaFreeAsync");
  failing([&] { return cudaFreeHost(c); }, "cudaFreeHost");
  failing([&] { return cudaEventDestroy(e); }, "cudaEventDestroy");
  failing([&] { return cudaStreamDestroy(s); }, "cudaStreamDestroy");
}

TEST_F(FakeCuda, AFailedExecutionEndsEverything) {
  cudaStream_t s = stream();
  cudaEvent_t e = event();
  float* a = floats(4);
  CUDA_OK(cudaMemsetAsync(a, 0, 16, s));
  CUDA_OK(cudaStreamSynchronize(s));
  fail_execution(1);
  CUDA_OK(launch_add(a, a, 1.0f, 4, s));
  drain();
  CUDA_OK(launch_add(a, a, 2.0f, 4, s));  // does not execute
  drain();
  EXPECT_EQ(cudaEventRecord(e, s), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaEventQuery(e), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaStreamSynchronize(s), cudaErrorIllegalAddress);
  clear_faults();
  EXPECT_EQ(read(a, 4, s), std::vector<float>(4, 1.0f));
  CUDA_OK(cudaFree(a));
  CUDA_OK(cudaEventDestroy(e));
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCuda, QueriesHaveNumbersOfTheirOwn) {
  cudaEvent_t e = event();
  fail_call(0);
  fail_query(1);
  EXPECT_EQ(cudaEventQuery(e), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(e), cudaErrorUnknown);
  EXPECT_EQ(failed_call(), "cudaEventQuery");
  EXPECT_EQ(cudaEventDestroy(e), cudaErrorUnknown);
}

// Kernels on one stream that the other would have to overtake in the time of one copy.
constexpr int kDepth = 20;

// What differs from a correct pipeline.
struct Fault {
  int64_t dropped_wait = -1;              // of this round
  std::chrono::milliseconds late_copy{};  // the copy is queued so much later
  bool stalled = false;                   // in that round nothing computes before the copy is done
};

// On a stream until the flag is set, or until a test has failed anyway.
void CUDART_CB stall(void* flag) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  const auto* copied = static_cast<const std::atomic<bool>*>(flag);
  while (!copied->load() && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

// Compute on one stream, copy on another, an event between them.
void pipeline(cudaStream_t compute, cudaStream_t copy, cudaEvent_t e, float* a, float* host,
              int rounds, const Fault& fault, int* wrong) {
  for (int i = 0; i < rounds; ++i) {
    std::atomic<bool> copied{false};
    CUDA_OK(cudaMemsetAsync(a, 0, kN * 4, compute));
    if (fault.stalled && i == fault.dropped_wait) {
      CUDA_OK(cudaLaunchHostFunc(compute, stall, &copied));
    }
    for (int k = 0; k < kDepth; ++k) CUDA_OK(launch_add(a, a, static_cast<float>(i), kN, compute));
    CUDA_OK(cudaEventRecord(e, compute));
    std::this_thread::sleep_for(fault.late_copy);
    CUDA_OK(cudaStreamWaitEvent(copy, e, 0));
    CUDA_OK(cudaMemcpyAsync(host, a, kN * 4, cudaMemcpyDeviceToHost, copy));
    CUDA_OK(cudaStreamSynchronize(copy));
    copied = true;
    *wrong += host[kN - 1] != static_cast<float>(kDepth * i);
    CUDA_OK(cudaStreamSynchronize(compute));
  }
}

class FakeCudaPipeline : public FakeCuda {
 protected:
  void run(int rounds, const Fault& fault, int* wrong) {
    configure({.max_delay_us = 300, .seed = 3});
    cudaStream_t compute = stream(), copy = stream();  // numbers 0 and 1
    cudaEvent_t e = event();
    float *a = floats(kN), *host = pinned(kN);
    if (fault.dropped_wait >= 0) drop_wait({1, 0, static_cast<uint64_t>(fault.dropped_wait)});
    pipeline(compute, copy, e, a, host, rounds, fault, wrong);
    CUDA_OK(cudaFree(a));
    CUDA_OK(cudaFreeHost(host));
    CUDA_OK(cudaEventDestroy(e));
    CUDA_OK(cudaStreamDestroy(compute));
    CUDA_OK(cudaStreamDestroy(copy));
  }
};

TEST_F(FakeCudaPipeline, EventsOrderStreams) {
  int wrong = 0;
  run(50, {}, &wrong);
  EXPECT_EQ(wrong, 0);
}

TEST_F(FakeCudaPipeline, ADroppedWaitShows) {
  if (kTsan) GTEST_SKIP() << "the race that this makes is the subject of the death test";
  int wrong = 0;
  run(10, {.dropped_wait = 4, .stalled = true}, &wrong);
  EXPECT_EQ(wrong, 1) << "the wait of one round was dropped";
}

TEST_F(FakeCudaPipeline, ThreadSanitizerSeesTheDroppedWait) {
  if (!kTsan) GTEST_SKIP() << "needs ThreadSanitizer";
  EXPECT_DEATH(
      {
        int wrong = 0;
        run(10, {.dropped_wait = 4}, &wrong);
        std::_Exit(0);
      },
      "data race");
}

// Nothing came too early, and nothing of the fake's own ordered the two streams.
TEST_F(FakeCudaPipeline, ThreadSanitizerSeesTheDroppedWaitOfAStreamThatWasDone) {
  if (!kTsan) GTEST_SKIP() << "needs ThreadSanitizer";
  EXPECT_DEATH(
      {
        int wrong = 0;
        run(2, {.dropped_wait = 1, .late_copy = std::chrono::milliseconds(50)}, &wrong);
        std::_Exit(0);
      },
      "data race");
}

}  // namespace
}  // namespace sotto::fake_cuda
