// The fake CUDA runtime does what CUDA documents.
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "tests/emulation/cuda/fake_cuda_cases.h"

namespace sotto::fake_cuda {
namespace {

constexpr int kN = 1000;

TEST_F(FakeCuda, DevicesAreAsConfigured) {
  configure({.devices = 3, .memory_bytes = 1 << 20});
  int n = 0;
  CUDA_OK(cudaGetDeviceCount(&n));
  EXPECT_EQ(n, 3);
  EXPECT_EQ(cudaSetDevice(3), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  cudaDeviceProp prop;
  CUDA_OK(cudaGetDeviceProperties(&prop, 2));
  EXPECT_EQ(prop.warpSize, 32);
  EXPECT_EQ(prop.totalGlobalMem, 1u << 20);
  CUDA_OK(cudaSetDevice(2));
  int device = -1;
  CUDA_OK(cudaGetDevice(&device));
  EXPECT_EQ(device, 2);
  CUDA_OK(cudaSetDevice(0));
}

TEST_F(FakeCuda, CallsMakeContexts) {
  int value = 0;
  CUDA_OK(cudaGetDevice(&value));
  CUDA_OK(cudaGetDeviceCount(&value));
  EXPECT_TRUE(contexts().empty());
  CUDA_OK(cudaSetDevice(1));
  EXPECT_EQ(contexts(), std::set<int>{1});
  std::thread([] { CUDA_OK(cudaDeviceSynchronize()); }).join();  // on a thread's first device
  EXPECT_EQ(contexts(), (std::set<int>{0, 1}));
  CUDA_OK(cudaSetDevice(0));
}

TEST_F(FakeCuda, WithoutADriverEveryCallSaysSo) {
  configure({.driver = false});
  int n = 0;
  EXPECT_EQ(cudaGetDeviceCount(&n), cudaErrorInsufficientDriver);
  EXPECT_STREQ(cudaGetErrorName(cudaErrorInsufficientDriver), "cudaErrorInsufficientDriver");
  void* p = nullptr;
  EXPECT_EQ(cudaMalloc(&p, 4), cudaErrorInsufficientDriver);
}

TEST_F(FakeCuda, WithoutADeviceTheCountIsAnError) {
  configure({.devices = 0});
  int n = -1;
  EXPECT_EQ(cudaGetDeviceCount(&n), cudaErrorNoDevice);
}

TEST_F(FakeCuda, GraphsKeepUserObjects) {
  const auto s = stream();
  std::atomic<int> destroyed{0};
  const auto destroy = [](void* user) { ++*static_cast<std::atomic<int>*>(user); };
  CUDA_OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  CUDA_OK(cudaStreamGetCaptureInfo(s, &status, nullptr, &graph));
#else
  CUDA_OK(cudaStreamGetCaptureInfo_v2(s, &status, nullptr, &graph));
#endif
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  cudaUserObject_t object = nullptr;
  CUDA_OK(cudaUserObjectCreate(&object, &destroyed, destroy, 1, cudaUserObjectNoDestructorSync));
  CUDA_OK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  std::atomic<bool> go{false};
  CUDA_OK(cudaLaunchHostFunc(
      s,
      [](void* user) {
        while (!*static_cast<std::atomic<bool>*>(user)) std::this_thread::yield();
      },
      &go));
  CUDA_OK(cudaStreamEndCapture(s, &graph));
  cudaGraphExec_t exec = nullptr;
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaGraphLaunch(exec, s));
  CUDA_OK(cudaGraphExecDestroy(exec));
  EXPECT_EQ(destroyed, 0);  // the launch has it
  go = true;
  CUDA_OK(cudaStreamSynchronize(s));
  while (destroyed == 0) std::this_thread::yield();
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCuda, FreshMemoryIsNaN) {
  float* a = floats(kN);
  cudaStream_t s = stream();
  for (const float x : read(a, kN, s)) ASSERT_TRUE(std::isnan(x));
  CUDA_OK(cudaFree(a));
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCuda, MemoryOfADeviceHasALimit) {
  configure({.memory_bytes = 1000});
  void *a = nullptr, *b = nullptr;
  CUDA_OK(cudaMalloc(&a, 600));
  EXPECT_EQ(cudaMalloc(&b, 600), cudaErrorMemoryAllocation);
  EXPECT_EQ(b, nullptr);
  CUDA_OK(cudaSetDevice(1));
  CUDA_OK(cudaMalloc(&b, 600));
  size_t free = 0, total = 0;
  CUDA_OK(cudaMemGetInfo(&free, &total));
  EXPECT_EQ(free, 400u);
  EXPECT_EQ(total, 1000u);
  CUDA_OK(cudaSetDevice(0));
  CUDA_OK(cudaFree(a));
  CUDA_OK(cudaFree(b));
}

TEST_F(FakeCuda, PointersSayWhatTheyAre) {
  CUDA_OK(cudaSetDevice(1));
  float* device = floats(8);
  float* host = pinned(8);
  float registered[8];
  CUDA_OK(cudaHostRegister(registered, sizeof registered, 0));
  cudaPointerAttributes a;
  CUDA_OK(cudaPointerGetAttributes(&a, device + 3));
  EXPECT_EQ(a.type, cudaMemoryTypeDevice);
  EXPECT_EQ(a.device, 1);
  EXPECT_EQ(a.devicePointer, device + 3);
  EXPECT_EQ(a.hostPointer, nullptr);
  CUDA_OK(cudaPointerGetAttributes(&a, host));
  EXPECT_EQ(a.type, cudaMemoryTypeHost);
  EXPECT_EQ(a.hostPointer, host);
  CUDA_OK(cudaPointerGetAttributes(&a, registered));
  EXPECT_EQ(a.type, cudaMemoryTypeHost);
  CUDA_OK(cudaPointerGetAttributes(&a, &a));
  EXPECT_EQ(a.type, cudaMemoryTypeUnregistered);
  CUDA_OK(cudaFree(device));
  CUDA_OK(cudaFreeHost(host));
  CUDA_OK(cudaHostUnregister(registered));
  CUDA_OK(cudaSetDevice(0));
}

TEST_F(FakeCuda, AStreamIsInOrder) {
  configure({.max_delay_us = 200, .seed = 7});
  cudaStream_t s = stream();
  float* a = floats(kN);
  CUDA_OK(cudaMemsetAsync(a, 0, kN * 4, s));
  for (int i = 0; i < 20; ++i) CUDA_OK(launch_add(a, a, 1.0f, kN, s));
  const uint64_t copies = copies_to_host();
  EXPECT_EQ(read(a, kN, s), std::vector<float>(kN, 20.0f));
  EXPECT_EQ(copies_to_host(), copies + 1);
  EXPECT_EQ(launches() > 0, true);
  CUDA_OK(cudaFreeAsync(a, s));
  CUDA_OK(cudaStreamSynchronize(s));
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCuda, PageableSourcesAreStagedAndPinnedOnesAreNot) {
  if (kTsan) GTEST_SKIP() << "ThreadSanitizer sees that a buffer is used again too early";
  cudaStream_t s = stream();
  float *a = floats(1), *b = floats(1), *host = pinned(1);
  std::vector<float> pageable{1.0f};
  *host = 1.0f;
  hold();
  CUDA_OK(cudaMemcpyAsync(a, pageable.data(), 4, cudaMemcpyHostToDevice, s));
  CUDA_OK(cudaMemcpyAsync(b, host, 4, cudaMemcpyHostToDevice, s));
  pageable[0] = 2.0f;
  *host = 2.0f;
  resume();
  EXPECT_EQ(read(a, 1, s)[0], 1.0f);
  EXPECT_EQ(read(b, 1, s)[0], 2.0f);
  CUDA_OK(cudaFree(a));
  CUDA_OK(cudaFree(b));
  CUDA_OK(cudaFreeHost(host));
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCuda, DevicesMayReachAllMemoryOfTheHost) {
  if (kTsan) GTEST_SKIP() << "ThreadSanitizer sees that a buffer is used again too early";
  configure({.pageable_access = true});
  cudaStream_t s = stream();
  float* a = floats(1);
  std::vector<float> from{1.0f}, to{0.0f};
  const uint64_t before = host_waits();
  hold();
  CUDA_OK(cudaMemcpyAsync(a, from.data(), 4, cudaMemcpyDefault, s));
  CUDA_OK(cudaMemcpyAsync(to.data(), a, 4, cudaMemcpyDefault, s));
  from[0] = 2.0f;
  EXPECT_EQ(host_waits(), before);
  resume();
  CUDA_OK(cudaStreamSynchronize(s));
  EXPECT_EQ(to[0], 2.0f);
  fake_cuda_check_reachable(to.data(), 4, "a test");
  EXPECT_DEATH(fake_cuda_check_reachable(a, 8, "a test"), "runs out of 4 bytes of device memory");
  CUDA_OK(cudaFree(a));
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCuda, CopiesToPageableMemoryWaitAndAreCounted) {
  cudaStream_t s = stream();
  float *a = floats(4), *host = pinned(4);
  const uint64_t before = host_waits();
  CUDA_OK(cudaMemcpyAsync(host, a, 16, cudaMemcpyDeviceToHost, s));
  EXPECT_EQ(host_waits(), before);
  read(a, 4, s);
  EXPECT_EQ(host_waits(), before + 1);
  CUDA_OK(cudaStreamSynchronize(s));
  EXPECT_EQ(host_waits(), before + 2);
  CUDA_OK(cudaFree(a));
  CUDA_OK(cudaFreeHost(host));
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCuda, AWaitIsBoundToTheLatestRecordOfItsTime) {
  cudaStream_t s = stream(), t = stream();
  cudaEvent_t e = event();
  std::atomic<int> ran{0};
  std::atomic<bool> open{false};
  const auto gate = [](void* p) {
    while (!*static_cast<std::atomic<bool>*>(p)) std::this_thread::yield();
  };
  const auto count = [](void* p) { ++*static_cast<std::atomic<int>*>(p); };
  CUDA_OK(cudaStreamWaitEvent(t, e, 0));  // never recorded: nothing to wait for
  CUDA_OK(cudaLaunchHostFunc(t, count, &ran));
  CUDA_OK(cudaStreamSynchronize(t));
  EXPECT_EQ(ran, 1);
  CUDA_OK(cudaEventRecord(e, s));
  CUDA_OK(cudaStreamWaitEvent(t, e, 0));
  CUDA_OK(cudaLaunchHostFunc(s, gate, &open));
  CUDA_OK(cudaEventRecord(e, s));  // later than the wait: it does not concern it
  CUDA_OK(cudaLaunchHostFunc(t, count, &ran));
  CUDA_OK(cudaStreamSynchronize(t));
  EXPECT_EQ(ran, 2);
  EXPECT_EQ(cudaEventQuery(e), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamQuery(s), cudaErrorNotReady);
  CUDA_OK(cudaStreamWaitEvent(t, e, 0));
  CUDA_OK(cudaEventDestroy(e));  // the wait goes on
  CUDA_OK(cudaLaunchHostFunc(t, count, &ran));
  EXPECT_EQ(cudaStreamQuery(t), cudaErrorNotReady);
  open = true;
  CUDA_OK(cudaStreamSynchronize(t));
  EXPECT_EQ(ran, 3);
  cudaGetLastError();
  CUDA_OK(cudaStreamDestroy(s));
  CUDA_OK(cudaStreamDestroy(t));
}

TEST_F(FakeCuda, EventsMeasureTime) {
  cudaStream_t s = stream();
  cudaEvent_t from = nullptr, to = nullptr, without = event();
  CUDA_OK(cudaEventCreate(&from));
  CUDA_OK(cudaEventCreate(&to));
  CUDA_OK(cudaEventRecord(from, s));
  CUDA_OK(cudaLaunchHostFunc(
      s, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }, nullptr));
  CUDA_OK(cudaEventRecord(to, s));
  CUDA_OK(cudaEventSynchronize(to));
  float ms = 0;
  CUDA_OK(cudaEventElapsedTime(&ms, from, to));
  EXPECT_GE(ms, 5.0f);
  EXPECT_EQ(cudaEventElapsedTime(&ms, from, without), cudaErrorInvalidResourceHandle);
  for (cudaEvent_t e : {from, to, without}) CUDA_OK(cudaEventDestroy(e));
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCuda, TheDefaultStreamIsOrderedWithBlockingStreamsAlone) {
  cudaStream_t blocking = nullptr, other = stream();
  CUDA_OK(cudaStreamCreate(&blocking));
  float* a = floats(kN);
  CUDA_OK(cudaMemsetAsync(a, 0, kN * 4, blocking));
  CUDA_OK(launch_add(a, a, 1.0f, kN, nullptr));   // after what is on the blocking stream
  CUDA_OK(launch_add(a, a, 2.0f, kN, blocking));  // after what is on the default stream
  EXPECT_EQ(read(a, kN, blocking), std::vector<float>(kN, 3.0f));
  std::atomic<bool> open{false};
  CUDA_OK(cudaLaunchHostFunc(
      nullptr,
      [](void* p) {
        while (!*static_cast<std::atomic<bool>*>(p)) std::this_thread::yield();
      },
      &open));
  CUDA_OK(cudaStreamSynchronize(other));  // does not wait for the default stream
  open = true;
  CUDA_OK(cudaFree(a));
  CUDA_OK(cudaStreamDestroy(blocking));
  CUDA_OK(cudaStreamDestroy(other));
}

TEST_F(FakeCuda, PoolsGiveMemoryInStreamOrder) {
  cudaMemPool_t pool = nullptr;
  CUDA_OK(cudaDeviceGetDefaultMemPool(&pool, 0));
  uint64_t threshold = UINT64_MAX, got = 0;
  CUDA_OK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
  CUDA_OK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &got));
  EXPECT_EQ(got, threshold);
  cudaStream_t s = stream();
  void* p = nullptr;
  CUDA_OK(cudaMallocFromPoolAsync(&p, 400, pool, s));
  EXPECT_EQ(live().device_bytes, 400u);
  hold();
  CUDA_OK(cudaMemsetAsync(p, 0, 400, s));
  CUDA_OK(cudaFreeAsync(p, s));
  EXPECT_EQ(live().device_bytes, 400u);  // until the stream gets there
  resume();
  CUDA_OK(cudaStreamSynchronize(s));
  EXPECT_EQ(live().device_bytes, 0u);
  CUDA_OK(cudaStreamDestroy(s));
}

TEST_F(FakeCuda, LaunchesAreChecked) {
  cudaStream_t s = stream();
  const auto* function = reinterpret_cast<const void*>(&add_kernel);
  fake_cuda_register_kernel(function, &bind_add);
  const auto launch = [&](dim3 grid, dim3 block, size_t smem) {
    float *out = nullptr, *in = nullptr, x = 0;
    int n = 0;
    void* args[] = {&out, &in, &x, &n};
    return cudaLaunchKernel(function, grid, block, args, smem, s);
  };
  EXPECT_EQ(launch(dim3(1), dim3(1025), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(dim3(0), dim3(32), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(dim3(1, 70000), dim3(32), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(dim3(1), dim3(32), 100 * 1024), cudaErrorInvalidValue);
  CUDA_OK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 * 1024));
  EXPECT_EQ(launch(dim3(1), dim3(32), 100 * 1024), cudaSuccess);
  CUDA_OK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, 0));
  int blocks = 0;
  CUDA_OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 256, 0));
  EXPECT_EQ(blocks, 8);
  CUDA_OK(cudaStreamDestroy(s));
  cudaGetLastError();
}

}  // namespace
}  // namespace sotto::fake_cuda
