#include "cuda/kernels/zeroone.cuh"

#include "cuda/kernels/families.h"
#include "cuda/kernels/onebit.cuh"

namespace sotto::cuda {

cudaError_t launch_zeroone(cudaStream_t stream, KernelId id, uint32_t blocks,
                           const Params& params) {
  const LaunchShape shape{blocks, kThreads};
  switch (id) {
    case KernelId::kFrozenAdam: return launch<run_quads<FrozenAdamKernel>>(shape, stream, params);
    case KernelId::kZeroOneLocal:
      return launch<run_quads<ZeroOneLocalKernel>>(shape, stream, params);
    case KernelId::kZeroOneEncode:
      if (params.arguments<EncodeArgs>().identity)
        return launch<run_quads<AloneKernel<ZeroOneInput>>>(shape, stream, params);
      return launch<run_quads<EncodeKernel<ZeroOneInput>>>(shape, stream, params);
    case KernelId::kZeroOneEncodeUndo:
      return launch<run_quads<EncodeUndoKernel<ZeroOneInput>>>(shape, stream, params);
    case KernelId::kZeroOneSync: return launch<run_quads<ZeroOneSyncKernel>>(shape, stream, params);
    case KernelId::kZeroOneInPlaceLocal:
      return launch<run_quads<ZeroOneInPlaceLocalKernel>>(shape, stream, params);
    case KernelId::kZeroOneInPlaceSum:
      return launch<run_quads<ZeroOneInPlaceSumKernel>>(shape, stream, params);
    case KernelId::kZeroOneInPlaceSync:
      return launch<run_quads<ZeroOneInPlaceSyncKernel>>(shape, stream, params);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace sotto::cuda
