// On the fake CUDA runtime, which shows what a GPU would hide: the default stream that runs late,
// contexts on unused devices, streams that are held although they need not be, and calls
// that could wait for a held stream.
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/cuda/device_memory.h"
#include "tests/emulation/cuda/fake_cuda.h"

namespace sotto::test {
namespace {

class CudaHeldStreams : public ::testing::Test {
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
};

// NULL is all defaults, so the default stream too.
TEST_F(CudaHeldStreams, ACallWithoutOptionsComesAfterTheDefaultStream) {
  EXPECT_EQ(run_world(1, {},
                      [](Member& self) {
                        // The first stream that is made: number 0.
                        CUDA_OK(cudaStreamSynchronize(nullptr));
                        Tensors tensors(Where::kCuda);
                        std::vector<float> a(1000, 1), fresh(1000, 2), sum(1000, 0);
                        const sotto_buffer in = tensors.add(a), out = tensors.add(sum);
                        const sotto_buffer from = tensors.add(fresh);
                        tensors.sync();
                        fake_cuda::make_late(0, 100'000);
                        CUDA_OK(cudaMemcpyAsync(in.data, from.data, 4000, cudaMemcpyDeviceToDevice,
                                                nullptr));
                        OK(sotto_all_reduce(self.comm, &in, &out, 1, nullptr, nullptr));
                        tensors.download();
                        require(sum[0] == 2 && sum[999] == 2, "what the default stream has copied");
                      }),
            "");
}

// A rank whose tensors are on one device makes no context on another, whatever thread works for it.
TEST_F(CudaHeldStreams, ContextsAreMadeOnDevicesInUseAlone) {
  WorldOptions options;
  options.on_rank = [](int32_t) { CUDA_OK(cudaSetDevice(1)); };
  EXPECT_EQ(run_world(2, options,
                      [](Member& self) {
                        Tensors tensors(Where::kCuda, 1);
                        std::vector<float> a(3000, 1);
                        const sotto_buffer at = tensors.add(a);
                        const sotto_call call = tensors.call();
                        for (int round = 0; round < 3; ++round) {
                          sotto_op* op = nullptr;
                          OK(sotto_all_reduce(self.comm, &at, &at, 1, &call, &op));
                          OK(sotto_op_stream_wait(op, tensors.stream()));
                          tensors.sync();  // the progress thread drives
                          OK(sotto_op_wait(op, -1));
                          OK(sotto_op_release(op));
                        }
                        tensors.download();
                        require(a[2999] == 8, "the sum");
                      }),
            "");
  EXPECT_EQ(fake_cuda::contexts(), std::set<int>{1});
}

// Events order a stream behind an operation that only its device has to do with.
TEST_F(CudaHeldStreams, AreNotThoseOfOperationsThatTheHostHasNoPartIn) {
  const uint64_t holds = fake_cuda::calls("cuStreamWaitValue32");
  EXPECT_EQ(run_world(1, {},
                      [](Member& self) {
                        Tensors tensors(Where::kCuda);
                        std::vector<float> a(5000, 3), sum(5000, 0);
                        const sotto_buffer in = tensors.add(a), out = tensors.add(sum);
                        const sotto_call call = tensors.call();
                        for (int round = 0; round < 50; ++round) {
                          sotto_op* op = nullptr;
                          OK(sotto_all_reduce(self.comm, &in, &out, 1, &call, &op));
                          OK(sotto_op_stream_wait(op, tensors.stream()));
                          OK(sotto_op_release(op));
                        }
                        tensors.download();
                        require(sum[4999] == 3, "the sum");
                      }),
            "");
  EXPECT_EQ(fake_cuda::calls("cuStreamWaitValue32"), holds);
}

// Their words were made when the device was opened, so there are only so many.
TEST_F(CudaHeldStreams, HaveALimit) {
  std::atomic<bool> enough{false};
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        Tensors tensors(self.rank == 0 ? Where::kCuda : Where::kHost);
                        std::vector<float> a(1000, 1);
                        const sotto_buffer at = tensors.add(a);
                        const sotto_call call = tensors.call();
                        while (self.rank == 1 && !enough) std::this_thread::yield();
                        sotto_op* op = nullptr;
                        OK(sotto_all_reduce(self.comm, &at, &at, 1, &call, &op));
                        if (self.rank == 0) {
                          for (int i = 0; i < 16384; ++i)
                            OK(sotto_op_stream_wait(op, tensors.stream()));
                          FAILS(sotto_op_stream_wait(op, tensors.stream()), SOTTO_E_DEVICE,
                                "16384 streams of cuda:0 wait");
                          enough = true;
                        }
                        OK(sotto_op_wait(op, -1));
                        tensors.sync();
                        if (self.rank == 0) OK(sotto_op_stream_wait(op, tensors.stream()));
                        OK(sotto_op_release(op));
                      }),
            "");
}

// What waits until the device stands still would wait for a stream that is held.
TEST_F(CudaHeldStreams, DoNotHoldUpWhatIsGivenBack) {
  constexpr const char* kConfig = R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})";
  EXPECT_EQ(
      run_world(2, {},
                [&](Member& self) {
                  Tensors tensors(self.rank == 0 ? Where::kCuda : Where::kHost);
                  std::vector<float> p(3000, 1), g(3000, 1);
                  sotto_param param = {};
                  param.struct_size = sizeof param;
                  param.param = tensors.add(p);
                  param.grad = tensors.add(g);
                  tensors.sync();
                  const sotto_call call = tensors.call();
                  sotto_optim* optim = nullptr;
                  OK(sotto_optim_create(self.comm, kConfig, &param, 1, &optim));
                  OK(sotto_optim_step(optim, &call, nullptr));
                  OK(sotto_all_reduce(self.comm, &param.grad, &param.grad, 1, &call, nullptr));
                  OK(sotto_barrier(self.comm, nullptr, nullptr));
                  // The stream of rank 0 is held until rank 1 comes.
                  if (self.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
                  sotto_op* op = nullptr;
                  OK(sotto_all_reduce(self.comm, &param.grad, &param.grad, 1, &call, &op));
                  if (self.rank == 0) OK(sotto_op_stream_wait(op, tensors.stream()));
                  OK(sotto_optim_destroy(optim));
                  OK(sotto_op_wait(op, -1));
                  OK(sotto_op_release(op));
                  tensors.download();
                }),
      "");
  EXPECT_THAT(fake_cuda::waits_behind_holds(), testing::IsEmpty());
}

}  // namespace
}  // namespace sotto::test
