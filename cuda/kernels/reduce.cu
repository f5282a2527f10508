#include "cuda/kernels/bytes.cuh"
#include "cuda/kernels/families.h"

namespace sotto::cuda {

cudaError_t launch_reduce(cudaStream_t stream, KernelId, uint32_t blocks, const Params& params) {
  const LaunchShape shape{blocks, kThreads};
  const auto as = [&]<class Type>(Type) {
    return launch<run_quads<ReduceKernel<Type>>>(shape, stream, params);
  };
  switch (params.arguments<ReduceArgs>().dtype) {
    case Dtype::kF32: return as(PlainElement<float>());
    case Dtype::kF64: return as(PlainElement<double>());
    case Dtype::kF16: return as(HalfElement());
    case Dtype::kBF16: return as(BrainElement());
    case Dtype::kI8: return as(PlainElement<int8_t>());
    case Dtype::kI16: return as(PlainElement<int16_t>());
    case Dtype::kI32: return as(PlainElement<int32_t>());
    case Dtype::kI64: return as(PlainElement<int64_t>());
    case Dtype::kU8: return as(PlainElement<uint8_t>());
    case Dtype::kU16: return as(PlainElement<uint16_t>());
    case Dtype::kU32: return as(PlainElement<uint32_t>());
    case Dtype::kU64: return as(PlainElement<uint64_t>());
  }
  return cudaErrorInvalidValue;
}

}  // namespace sotto::cuda
