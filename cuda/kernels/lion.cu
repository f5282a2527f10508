#include "core/kernels/lion.h"

#include "cuda/kernels/families.h"
#include "cuda/kernels/first_moment.cuh"

namespace sotto::cuda {

cudaError_t launch_lion(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params) {
  const LaunchShape shape{blocks, kThreads};
  if (id == KernelId::kLion)
    return launch<run_quads<FirstMomentKernel<LionElement>>>(shape, stream, params);
  return launch<low_precision_step<LowPrecisionFirstMoment<LionElement>>>(shape, stream, params);
}

}  // namespace sotto::cuda
