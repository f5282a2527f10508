// The one way to launch a kernel; there is no <<<>>> in the project. What it ends in is one
// function of the runtime's ABI, which tests replace.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace sotto::cuda {

// One-dimensional: `blocks` thread blocks of `threads` threads each.
struct LaunchShape {
  uint32_t blocks = 1;
  uint32_t threads = 1;
  size_t dynamic_shared = 0;  // bytes
};

// Parameters of a kernel are one struct, passed by value, and so constant memory of the kernel.
template <class Params>
cudaError_t launch(void (*kernel)(Params), const LaunchShape& shape, cudaStream_t stream,
                   Params params) {
#if defined(SOTTO_SIMT)
  simt::register_kernel(kernel);
#endif
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.dynamic_shared;
  config.stream = stream;
  void* arguments[] = {&params};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

}  // namespace sotto::cuda
