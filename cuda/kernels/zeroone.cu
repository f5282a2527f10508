#include "cuda/kernels/zeroone.cuh"

#include "cuda/kernels/families.h"
#include "cuda/kernels/onebit.cuh"

namespace sotto::cuda {

cudaError_t launch_zeroone(cudaStream_t stream, KernelId id, uint32_t blocks,
                           const Params& params) {
  const LaunchShape shape{blocks, kThreads};
  switch (id) {
    case KernelId::kFrozenAdam: return launch<run_quads<FrozenAdamKernel>>(shape, stream, params);
    case KernelId::kLocalMomentum:
      return launch<run_quads<LocalMomentumKernel>>(shape, stream, params);
    case KernelId::kLocalFront:
      if (params.arguments<EncodeArgs>().identity)
        return launch<run_quads<AloneKernel<LocalInput>>>(shape, stream, params);
      return launch<run_quads<EncodeKernel<LocalInput>>>(shape, stream, params);
    case KernelId::kLocalFrontUndo:
      return launch<run_quads<EncodeUndoKernel<LocalInput>>>(shape, stream, params);
    case KernelId::kLocalSync: return launch<run_quads<LocalSyncKernel>>(shape, stream, params);
    case KernelId::kInPlaceLocal:
      return launch<run_quads<InPlaceLocalKernel>>(shape, stream, params);
    case KernelId::kInPlaceSum: return launch<run_quads<InPlaceSumKernel>>(shape, stream, params);
    case KernelId::kInPlaceSync: return launch<run_quads<InPlaceSyncKernel>>(shape, stream, params);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace sotto::cuda
