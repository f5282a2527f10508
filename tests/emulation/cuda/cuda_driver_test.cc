// What drivers do although CUDA's model does not say so: streams share hardware queues, and calls
// that wait for the device keep the context's lock.
#include <cuda.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/emulation/cuda/fake_cuda_cases.h"

namespace sotto::fake_cuda {
namespace {

constexpr int kN = 100;

class FakeDriver : public FakeCuda {
 protected:
  // A word of pinned memory, 0, for which a stream waits.
  struct Word {
    Word() : at(reinterpret_cast<uint32_t*>(pinned(1))) { *at = 0; }
    ~Word() { EXPECT_EQ(cudaFreeHost(at), cudaSuccess); }
    void set() { std::atomic_ref(*at).store(1, std::memory_order_release); }
    uint32_t* at;
  };
  static void wait_for(const Word& word, cudaStream_t stream) {
    void* entry = nullptr;
    ASSERT_EQ(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &entry, 12000,
                                               cudaEnableDefault, nullptr),
              cudaSuccess);
    const auto wait =
        reinterpret_cast<CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned)>(entry);
    ASSERT_EQ(wait(stream, reinterpret_cast<CUdeviceptr>(word.at), 1, CU_STREAM_WAIT_VALUE_GEQ),
              CUDA_SUCCESS);
  }
  // For as long as it takes on a machine that is busy.
  static bool comes(const std::atomic<bool>& flag) {
    for (int i = 0; i < 20000 && !flag; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return flag;
  }
  static void expect_idle_soon(cudaStream_t s) {
    for (int i = 0; i < 20000 && cudaStreamQuery(s) != cudaSuccess; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(cudaStreamQuery(s), cudaSuccess);
  }
  static void set(void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; }
  // A host function that waits until its flag is set.
  static void await(void* flag) {
    while (!*static_cast<std::atomic<bool>*>(flag)) std::this_thread::yield();
  }
  static void short_time() { std::this_thread::sleep_for(std::chrono::milliseconds(30)); }
};

// What is behind a wait in a hardware queue does not begin, though its stream is another.
TEST_F(FakeDriver, AWaitHoldsUpTheStreamsOfItsHardwareQueue) {
  for (const int queues : {1, 2}) {
    configure({.hardware_queues = queues});
    cudaStream_t a = stream(), b = stream(), c = stream();  // with two queues c is in a's
    std::atomic<bool> of_b{false}, of_c{false};
    {
      Word word;
      wait_for(word, a);
      CUDA_OK(cudaLaunchHostFunc(b, set, &of_b));
      CUDA_OK(cudaLaunchHostFunc(c, set, &of_c));
      if (queues == 2) {
        EXPECT_TRUE(comes(of_b));
      }
      short_time();
      EXPECT_EQ(of_b, queues == 2);
      EXPECT_FALSE(of_c);
      word.set();
      EXPECT_TRUE(comes(of_b));
      EXPECT_TRUE(comes(of_c));
    }
    for (cudaStream_t s : {a, b, c}) CUDA_OK(cudaStreamDestroy(s));
    drain();
  }
}

// A wait for an event is one too, until the event has come.
TEST_F(FakeDriver, AWaitForAnEventHoldsUpItsHardwareQueue) {
  configure({.hardware_queues = 2});
  cudaStream_t far = stream(), a = stream(), unused = stream(), b = stream();  // a and b share
  cudaEvent_t e = event();
  std::atomic<bool> go{false}, of_b{false};
  CUDA_OK(cudaLaunchHostFunc(far, await, &go));
  CUDA_OK(cudaEventRecord(e, far));
  CUDA_OK(cudaStreamWaitEvent(a, e, 0));
  CUDA_OK(cudaLaunchHostFunc(b, set, &of_b));
  short_time();
  EXPECT_FALSE(of_b);
  go = true;
  EXPECT_TRUE(comes(of_b));
  CUDA_OK(cudaEventDestroy(e));
  for (cudaStream_t s : {far, a, unused, b}) CUDA_OK(cudaStreamDestroy(s));
}

// Work that has begun is not in the way; what comes after it in its stream is.
TEST_F(FakeDriver, WorkHoldsUpItsHardwareQueueUntilItBegins) {
  configure({.hardware_queues = 1});
  cudaStream_t a = stream(), b = stream();
  std::atomic<bool> go{false}, first{false}, second{false};
  CUDA_OK(cudaLaunchHostFunc(a, await, &go));
  CUDA_OK(cudaLaunchHostFunc(b, set, &first));
  EXPECT_TRUE(comes(first));
  CUDA_OK(cudaLaunchHostFunc(a, set, &second));
  first = false;
  CUDA_OK(cudaLaunchHostFunc(b, set, &first));
  short_time();
  EXPECT_FALSE(first) << "behind what waits for the other stream";
  go = true;
  EXPECT_TRUE(comes(first));
  EXPECT_TRUE(second);
  for (cudaStream_t s : {a, b}) CUDA_OK(cudaStreamDestroy(s));
}

// The first launch of a kernel waits for the device, and all other calls for it.
TEST_F(FakeDriver, AFirstLaunchKeepsTheLockUntilTheDeviceStandsStill) {
  configure({.context_lock = true});
  cudaStream_t a = stream(), b = stream();
  cudaEvent_t e = event();
  float* x = floats(kN);
  CUDA_OK(cudaEventRecord(e, b));
  {
    Word word;
    std::atomic<bool> launches{false}, queries{false};
    wait_for(word, a);
    std::thread launching([&] {
      EXPECT_EQ(launch_add(x, x, 1, kN, b), cudaSuccess);
      launches = true;
    });
    short_time();
    std::thread querying([&] {
      EXPECT_EQ(cudaEventQuery(e), cudaSuccess);
      queries = true;
    });
    short_time();
    EXPECT_FALSE(launches);
    EXPECT_FALSE(queries) << "the lock is taken";
    word.set();
    launching.join();
    querying.join();
    CUDA_OK(cudaStreamSynchronize(b));
  }
  // Not the second one.
  Word word;
  wait_for(word, a);
  CUDA_OK(launch_add(x, x, 1, kN, b));
  expect_idle_soon(b);
  word.set();
  CUDA_OK(cudaStreamSynchronize(a));
  CUDA_OK(cudaFree(x));
  CUDA_OK(cudaEventDestroy(e));
  for (cudaStream_t s : {a, b}) CUDA_OK(cudaStreamDestroy(s));
}

class FakeDriverDeathTest : public FakeDriver {};

// On the thread that would end it, a wait of the device is a deadlock.
TEST_F(FakeDriverDeathTest, WaitsThatCannotEndAreTold) {
  configure({.context_lock = true, .deadlock_ms = 200});
  cudaStream_t a = stream(), b = stream();
  float* x = floats(kN);
  std::vector<float> pageable(kN);
  cudaMemPool_t pool = nullptr;
  CUDA_OK(cudaDeviceGetDefaultMemPool(&pool, 0));
  {
    Word word;
    wait_for(word, a);
    EXPECT_DEATH(
        launch_add(x, x, 1, kN, b),
        "cudaLaunchKernelExC of a kernel that is not loaded waits with the context's lock "
        "for device 0, where after 200 ms there is work left: a deadlock with stream 0 .in "
        "a wait.");
    EXPECT_DEATH(pinned(1), "cudaMallocHost waits with the context's lock");
    EXPECT_DEATH(stream(), "cudaStreamCreateWithFlags waits with the context's lock");
    EXPECT_DEATH(cudaMemPoolTrimTo(pool, 0), "cudaMemPoolTrimTo waits with the context's lock");
    EXPECT_DEATH(cudaMemPoolDestroy(pool), "cudaMemPoolDestroy waits with the context's lock");
    EXPECT_DEATH(cudaMemcpyAsync(pageable.data(), x, 4, cudaMemcpyDeviceToHost, a),
                 "cudaMemcpyAsync to pageable memory waits with the context's lock");
    word.set();
    CUDA_OK(cudaStreamSynchronize(a));
  }
  CUDA_OK(cudaFree(x));
  for (cudaStream_t s : {a, b}) CUDA_OK(cudaStreamDestroy(s));
}

}  // namespace
}  // namespace sotto::fake_cuda
