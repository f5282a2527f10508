#include "cuda/kernels/sparse.cuh"

#include "cuda/kernels/families.h"

namespace sotto::cuda {
namespace {

template <class Team>
cudaError_t launch_with(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params) {
  const LaunchShape shape{blocks, kThreads};
  switch (id) {
    case KernelId::kSparseEncode: return launch<sparse_encode<Team>>(shape, stream, params);
    case KernelId::kSparseEncodeUndo: return launch<sparse_undo<Team>>(shape, stream, params);
    case KernelId::kSparseSquares: return launch<sparse_squares<Team>>(shape, stream, params);
    case KernelId::kSparseMean: return launch<sparse_mean<Team>>(shape, stream, params);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_sparse(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params) {
  if (id == KernelId::kSparseMedian)
    return launch<sparse_median>(LaunchShape{1, kThreads}, stream, params);
  return params.arguments<SparseArgs>().settings.block <= kWarpSparseBlock
             ? launch_with<SparseWarp>(stream, id, blocks, params)
             : launch_with<SparseThreads>(stream, id, blocks, params);
}

}  // namespace sotto::cuda
