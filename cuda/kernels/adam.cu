#include "cuda/kernels/adam.cuh"

#include "cuda/kernels/families.h"
#include "cuda/kernels/first_moment.cuh"

namespace sotto::cuda {

cudaError_t launch_adam(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params) {
  const LaunchShape shape{blocks, kThreads};
  switch (id) {
    case KernelId::kSumSquares: return launch<run_quads<SumSquaresKernel>>(shape, stream, params);
    case KernelId::kAdam: return launch<run_quads<AdamKernel>>(shape, stream, params);
    case KernelId::kAdamLowPrecision:
      return launch<low_precision_step<LowPrecisionAdam>>(shape, stream, params);
    case KernelId::kLambMoments: return launch<run_quads<LambMomentsKernel>>(shape, stream, params);
    case KernelId::kLambUpdate: return launch<run_quads<LambUpdateKernel>>(shape, stream, params);
    case KernelId::kSgd:
      return launch<run_quads<FirstMomentKernel<SgdElement>>>(shape, stream, params);
    case KernelId::kSgdLowPrecision:
      return launch<low_precision_step<LowPrecisionFirstMoment<SgdElement>>>(shape, stream, params);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace sotto::cuda
