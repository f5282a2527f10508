// The one way to launch a kernel; there is no <<<>>> in the project. What it ends in is one
// function of the runtime's ABI, which tests replace.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sotto::cuda {

// Every kernel that a launch() in the program names, in no order. They are listed when the program
// starts, so that a device can load them all.
std::vector<const void*>& launched_kernels();

struct ListedKernel {
  template <class Params>
  explicit ListedKernel(void (*kernel)(Params)) {
#if defined(SOTTO_SIMT)
    simt::register_kernel(kernel);
#endif
    launched_kernels().push_back(reinterpret_cast<const void*>(kernel));
  }
};
template <auto kernel>
struct Listed {
  static const ListedKernel entry;
};
template <auto kernel>
const ListedKernel Listed<kernel>::entry(kernel);

// One-dimensional: `blocks` thread blocks of `threads` threads each.
struct LaunchShape {
  uint32_t blocks = 1;
  uint32_t threads = 1;
  size_t dynamic_shared = 0;  // bytes
};

// Parameters of a kernel are one struct, passed by value, and so constant memory of the kernel.
template <auto kernel, class Params>
cudaError_t launch(const LaunchShape& shape, cudaStream_t stream, Params params) {
  (void)&Listed<kernel>::entry;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.dynamic_shared;
  config.stream = stream;
  void* arguments[] = {&params};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

}  // namespace sotto::cuda
