// What a trainer does around steps, on a runtime that does what drivers may do: kernels are loaded
// when they are first launched, allocations and copies to pageable memory wait for the device with
// the context's lock, and streams share hardware queues.
#include <gtest/gtest.h>

#include "tests/cuda/device_memory.h"
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/cuda/kernel_registry.h"

namespace sotto::test {
namespace {

// Kernels of the trainer's own, each of which is launched for the first time once.
template <int kNumber>
void foreign(float* at) {
  at[0] += kNumber;
}
template <int kNumber>
cudaError_t launch_foreign(float* at, cudaStream_t stream) {
  const auto* function = reinterpret_cast<const void*>(&foreign<kNumber>);
  fake_cuda_register_kernel(
      function, [](const void*, void** args, const fake_cuda::LaunchShape&) -> fake_cuda::Job {
        return [at = *static_cast<float**>(args[0])] { foreign<kNumber>(at); };
      });
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  config.stream = stream;
  void* args[] = {&at};
  return cudaLaunchKernelExC(&config, function, args);
}

// loss.item(), a new stream and pinned memory, as PyTorch makes them between kernels.
void look_at(const float* loss, cudaStream_t stream) {
  float value = 0;
  CUDA_OK(cudaMemcpyAsync(&value, loss, sizeof value, cudaMemcpyDeviceToHost, stream));
  void* pinned = nullptr;
  CUDA_OK(cudaMallocHost(&pinned, 64));
  CUDA_OK(cudaFreeHost(pinned));
  cudaStream_t more = nullptr;
  CUDA_OK(cudaStreamCreateWithFlags(&more, cudaStreamNonBlocking));
  CUDA_OK(cudaStreamDestroy(more));
}

template <int kNumber>
void iteration(sotto_optim* optim, Tensors& tensors, float* loss) {
  const sotto_call call = tensors.call();
  sotto_op* op = nullptr;
  OK(sotto_optim_step(optim, &call, &op));
  OK(sotto_op_stream_wait(op, tensors.stream()));
  CUDA_OK(launch_foreign<kNumber>(loss, tensors.stream()));
  look_at(loss, tensors.stream());
  OK(sotto_op_wait(op, -1));
  OK(sotto_op_release(op));
}

// Every rank on a device of its own, as processes are.
std::string train() {
  WorldOptions options;
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank)); };
  return run_world(2, options, [](Member& self) {
    Tensors tensors(Where::kCuda, self.rank);
    std::vector<float> p(3000, 1), g(3000, 1), loss(1, 0);
    sotto_param param = {};
    param.struct_size = sizeof param;
    param.param = tensors.add(p);
    param.grad = tensors.add(g);
    auto* const at = static_cast<float*>(tensors.add(loss).data);
    sotto_optim* optim = nullptr;
    OK(sotto_optim_create(self.comm, R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})",
                          &param, 1, &optim));
    iteration<1>(optim, tensors, at);
    iteration<2>(optim, tensors, at);
    iteration<3>(optim, tensors, at);
    tensors.download();
    require(loss[0] == 6 && p[0] != 1, "three steps");
    OK(sotto_optim_destroy(optim));
  });
}

class CudaDrivers : public ::testing::TestWithParam<int> {  // hardware queues
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    fake_cuda::clear_faults();
    fake_cuda::configure(
        {.hardware_queues = GetParam(), .context_lock = true, .deadlock_ms = 30'000});
  }
};

TEST_P(CudaDrivers, DoNotKeepATrainerFromItsSteps) { EXPECT_EQ(train(), ""); }

// That the runtime shows it: blocked streams do.
TEST_P(CudaDrivers, ShowTheDeadlockOfABlockedStream) {
  EXPECT_DEATH(
      {
        setenv("SOTTO_STREAM_BLOCK", "1", 1);
        setenv("CUDA_MODULE_LOADING", "EAGER", 1);  // which the runtime does not heed
        fake_cuda::configure(
            {.hardware_queues = GetParam(), .context_lock = true, .deadlock_ms = 500});
        train();
      },
      "waits with the context's lock .* a deadlock");
}

INSTANTIATE_TEST_SUITE_P(HardwareQueues, CudaDrivers, ::testing::Values(1, 8, 32),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace sotto::test
