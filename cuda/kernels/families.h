// Launches of the kernels of one file each; launch_prepared() chooses.
#pragma once

#include "cuda/kernels/tables.h"
#include "cuda/launch.h"

namespace sotto::cuda {

cudaError_t launch_adam(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params);
cudaError_t launch_bytes(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params);
cudaError_t launch_reduce(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params);
cudaError_t launch_onebit(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params);
cudaError_t launch_onebit_lamb(cudaStream_t stream, KernelId id, uint32_t blocks,
                               const Params& params);
cudaError_t launch_quant(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params);
cudaError_t launch_scalars(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params);
cudaError_t launch_zeroone(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params);
// Operands: destination, source; params.bytes.
cudaError_t launch_copy_bytes(cudaStream_t stream, uint32_t blocks, const Params& params);
// Operand: a word.
cudaError_t launch_count(cudaStream_t stream, const Params& params);

}  // namespace sotto::cuda
