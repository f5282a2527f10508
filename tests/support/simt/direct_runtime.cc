// A test tool: the one function of CUDA's runtime that launching needs, executed at once by the
// caller. For tests of kernels alone; tests of devices use the fake runtime.
#include <cuda_runtime_api.h>

#include "tests/support/simt/registry.h"

extern "C" SIMT_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config,
                                                    const void* function, void** args) {
  const simt::Kernel kernel = simt::find_kernel(function);
  const simt::Grid grid{config->gridDim, config->blockDim, config->dynamicSmemBytes};
  if (kernel.bind == nullptr) return cudaErrorInvalidDeviceFunction;
  if (!simt::valid_grid(grid)) return cudaErrorInvalidConfiguration;
  simt::run_grid(grid, kernel.function, kernel.bind(kernel.function, args));
  return cudaSuccess;
}
