#include "cuda/kernels/quant.cuh"

#include "cuda/kernels/families.h"

namespace sotto::cuda {

cudaError_t launch_quant(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params) {
  const LaunchShape shape{blocks, kThreads};
  switch (id) {
    case KernelId::kQuantEncode: return launch<quant_encode<QuantTensors>>(shape, stream, params);
    case KernelId::kQuantServer: return launch<quant_encode<QuantRows>>(shape, stream, params);
    case KernelId::kQuantDecode: return launch<run_quads<QuantDecodeKernel>>(shape, stream, params);
    case KernelId::kQuantEncodeUndo:
      return launch<run_quads<QuantUndoKernel>>(shape, stream, params);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace sotto::cuda
