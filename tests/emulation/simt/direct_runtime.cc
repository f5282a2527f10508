// A test tool: the functions of CUDA's runtime that launching needs, executed at once by the
// caller, and memory for pinned_new.cc. For tests of kernels alone; tests of devices use the fake
// runtime in its place.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <map>

#include "tests/emulation/simt/registry.h"

namespace {

std::map<const void*, sotto::fake_cuda::Binder>& binders() {
  static std::map<const void*, sotto::fake_cuda::Binder> all;
  return all;
}

}  // namespace

extern "C" {

SIMT_API void fake_cuda_register_kernel(const void* kernel, sotto::fake_cuda::Binder binder) {
  binders()[kernel] = binder;
}

SIMT_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                         void** args) {
  const auto binder = binders().find(function);
  if (binder == binders().end()) return cudaErrorInvalidDeviceFunction;
  if (!simt::valid_grid({config->gridDim, config->blockDim, config->dynamicSmemBytes}))
    return cudaErrorInvalidConfiguration;
  const simt::LaunchShape shape{config->gridDim, config->blockDim, config->dynamicSmemBytes};
  binder->second(function, args, shape)();
  return cudaSuccess;
}

SIMT_API cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  constexpr size_t kPage = 4096;
  *memory = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  return *memory != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}

SIMT_API cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}

}  // extern "C"
