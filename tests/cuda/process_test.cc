// What the library shares with the rest of the process on a device: per-thread streams and memory
// pools. On the fake CUDA runtime.
#include <chrono>
#include <thread>

#include "tests/cuda/device_memory.h"
#include "tests/emulation/cuda/fake_cuda.h"

namespace sotto::test {
namespace {

class CudaProcess : public ::testing::Test {
 protected:
  void SetUp() override {
    fake_cuda::clear_faults();
    fake_cuda::configure({});
  }
  void TearDown() override {
    fake_cuda::drain();
    EXPECT_EQ(fake_cuda::live(), fake_cuda::Live{}) << fake_cuda::live().text();
  }
};

// The handle is another stream in each thread: operations take the caller's, and a capture would
// take those of the threads that make it.
TEST_F(CudaProcess, StreamsOfAThreadAreTakenByCallsAndNotCaptured) {
  fake_cuda::configure({.per_thread_stream = true});
  constexpr const char* kConfig = R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})";
  EXPECT_EQ(run_world(1, {},
                      [&](Member& self) {
                        Tensors tensors(Where::kCuda);
                        std::vector<float> a(1000, 1), fresh(1000, 2), sum(1000, 0), p(1000, 1);
                        const sotto_buffer in = tensors.add(a), out = tensors.add(sum);
                        const sotto_buffer from = tensors.add(fresh);
                        sotto_param param = {};
                        param.struct_size = sizeof param;
                        param.param = tensors.add(p);
                        param.grad = in;
                        tensors.sync();
                        sotto_optim* optim = nullptr;
                        OK(sotto_optim_create(self.comm, kConfig, &param, 1, &optim));
                        const sotto_call call =
                            call_with([](sotto_call& c) { c.stream = cudaStreamPerThread; });
                        const auto late = [](void*) {
                          std::this_thread::sleep_for(std::chrono::milliseconds(50));
                        };
                        CUDA_OK(cudaLaunchHostFunc(cudaStreamPerThread, late, nullptr));
                        CUDA_OK(cudaMemcpyAsync(in.data, from.data, 4000, cudaMemcpyDeviceToDevice,
                                                cudaStreamPerThread));
                        OK(sotto_all_reduce(self.comm, &in, &out, 1, &call, nullptr));
                        tensors.download();
                        require(sum[0] == 2 && sum[999] == 2,
                                "what the thread's stream has copied");

                        sotto_op* op = nullptr;
                        CUDA_OK(cudaStreamBeginCapture(cudaStreamPerThread,
                                                       cudaStreamCaptureModeThreadLocal));
                        FAILS(sotto_optim_step(optim, &call, &op), SOTTO_E_INVALID_ARGUMENT,
                              "cuda:0 cannot be captured on cudaStreamPerThread");
                        cudaGraph_t graph = nullptr;
                        CUDA_OK(cudaStreamEndCapture(cudaStreamPerThread, &graph));  // not spoilt
                        CUDA_OK(cudaGraphDestroy(graph));
                        OK(sotto_optim_step(optim, &call, nullptr));
                        OK(sotto_optim_destroy(optim));
                      }),
            "");
}

// A thread's stream comes after an operation of which another thread drives the host's part.
TEST_F(CudaProcess, StreamsOfAThreadComeAfterOperationsThatOthersDrive) {
  fake_cuda::configure({.max_delay_us = 200, .per_thread_stream = true});
  for (const char* transport : {"inproc", "tcp"}) {
    WorldOptions options;
    options.transport = transport;
    options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank)); };
    EXPECT_EQ(run_world(2, options,
                        [](Member& self) {
                          Tensors tensors(Where::kCuda, self.rank);
                          std::vector<float> a(3000, 1), sum(3000), copy(3000);
                          const sotto_buffer in = tensors.add(a), out = tensors.add(sum);
                          const sotto_buffer to = tensors.add(copy);
                          const sotto_call call =
                              call_with([](sotto_call& c) { c.stream = cudaStreamPerThread; });
                          for (int round = 0; round < 5; ++round) {
                            CUDA_OK(cudaMemsetAsync(out.data, 0, 12'000, cudaStreamPerThread));
                            sotto_op* op = nullptr;
                            OK(sotto_all_reduce(self.comm, &in, &out, 1, &call, &op));
                            std::jthread drives([op] { (void)sotto_op_wait(op, -1); });
                            OK(sotto_op_stream_wait(op, cudaStreamPerThread));
                            CUDA_OK(cudaMemcpyAsync(to.data, out.data, 12'000,
                                                    cudaMemcpyDeviceToDevice, cudaStreamPerThread));
                            CUDA_OK(cudaStreamSynchronize(cudaStreamPerThread));
                            drives.join();
                            OK(sotto_op_error(op, nullptr));
                            OK(sotto_op_release(op));
                            tensors.download();
                            require(copy == std::vector<float>(3000, 2), "the sum of both");
                          }
                          OK(sotto_barrier(self.comm, nullptr, nullptr));
                        }),
              "")
        << transport;
  }
}

// What the process sets for a device's default pool is its own, and what the library sets is not
// the process's.
TEST_F(CudaProcess, MemoryComesFromAPoolOfTheLibrarysOwn) {
  cudaMemPool_t pool = nullptr;
  CUDA_OK(cudaDeviceGetDefaultMemPool(&pool, 0));
  const uint64_t others = fake_cuda::calls("cudaMallocAsync");
  const uint64_t own = fake_cuda::calls("cudaMallocFromPoolAsync");
  WorldOptions options;
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank)); };
  EXPECT_EQ(run_world(2, options,
                      [](Member& self) {
                        Tensors tensors(Where::kCuda, self.rank);
                        std::vector<float> a(3000, 1);
                        const sotto_buffer at = tensors.add(a);
                        const sotto_call call = tensors.call();
                        OK(sotto_all_reduce(self.comm, &at, &at, 1, &call, nullptr));
                        EXPECT_GE(fake_cuda::live().pools, 1u);
                      }),
            "");
  EXPECT_EQ(fake_cuda::calls("cudaMallocAsync"), others + 2);  // those of the tensors
  EXPECT_GT(fake_cuda::calls("cudaMallocFromPoolAsync"), own);
  cudaMemLocation peer = {};
  peer.type = cudaMemLocationTypeDevice;
  peer.id = 1;
  cudaMemAccessFlags access = cudaMemAccessFlagsProtReadWrite;
  CUDA_OK(cudaMemPoolGetAccess(&access, pool, &peer));
  EXPECT_EQ(access, cudaMemAccessFlagsProtNone);
}

}  // namespace
}  // namespace sotto::test
