// Kernels for tests of the emulator: right ones, and wrong ones that it must catch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sotto::test {

struct PlantedArgs {
  uint32_t* out = nullptr;
  const float* in = nullptr;
  uint64_t n = 0;
};

// Launches the kernel of that name; cudaErrorInvalidValue if there is none.
__attribute__((visibility("default"))) cudaError_t launch_planted(std::string_view name, dim3 grid,
                                                                  dim3 block, size_t dynamic_shared,
                                                                  const PlantedArgs& args);

}  // namespace sotto::test
