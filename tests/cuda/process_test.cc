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

}  // namespace
}  // namespace sotto::test
