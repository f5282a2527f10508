#include "cuda/kernels/onebit.cuh"

#include "cuda/kernels/families.h"
#include "cuda/kernels/onebit_lamb.cuh"

namespace sotto::cuda {

cudaError_t launch_onebit(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params) {
  const LaunchShape shape{blocks, kThreads};
  switch (id) {
    case KernelId::kOnebitEncode:
      return launch<run_quads<EncodeKernel<TensorInput>>>(shape, stream, params);
    case KernelId::kOnebitEncodeUndo:
      return launch<run_quads<EncodeUndoKernel<TensorInput>>>(shape, stream, params);
    case KernelId::kOnebitServer: return launch<run_quads<ServerKernel>>(shape, stream, params);
    case KernelId::kOnebitDecode: return launch<run_quads<DecodeKernel>>(shape, stream, params);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t launch_onebit_lamb(cudaStream_t stream, KernelId id, uint32_t blocks,
                               const Params& params) {
  const LaunchShape shape{blocks, kThreads};
  switch (id) {
    case KernelId::kOnebitLambEncode:
      if (params.arguments<EncodeArgs>().identity)
        return launch<run_quads<AloneKernel<LambInput>>>(shape, stream, params);
      return launch<run_quads<EncodeKernel<LambInput>>>(shape, stream, params);
    case KernelId::kOnebitLambEncodeUndo:
      return launch<run_quads<EncodeUndoKernel<LambInput>>>(shape, stream, params);
    case KernelId::kFreezeVariance:
      return launch<run_quads<FreezeVarianceKernel>>(shape, stream, params);
    case KernelId::kOnebitLambFactor: return launch<run_quads<FactorKernel>>(shape, stream, params);
    case KernelId::kMomentumUpdate:
      return launch<run_quads<MomentumUpdateKernel>>(shape, stream, params);
    case KernelId::kMomentumFromBits:
      return launch<run_quads<MomentumFromBitsKernel>>(shape, stream, params);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace sotto::cuda
