// Launches of the kernels of one file each; launch_prepared() chooses.
#pragma once

#include "cuda/kernels/tables.h"
#include "cuda/launch.h"

namespace sotto::cuda {

// A name that several kernels have is declared several times, which says the same.
#define SOTTO_KERNEL(type, function, family)                                     \
  cudaError_t launch_##family(cudaStream_t stream, KernelId id, uint32_t blocks, \
                              const Params& params);
#include "core/kernels/kernels.def"
// Operands: destination, source; params.bytes.
cudaError_t launch_copy_bytes(cudaStream_t stream, uint32_t blocks, const Params& params);
// Operand: a word.
cudaError_t launch_count(cudaStream_t stream, const Params& params);

}  // namespace sotto::cuda
