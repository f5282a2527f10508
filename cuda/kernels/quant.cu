#include "cuda/kernels/quant.cuh"

#include "cuda/kernels/families.h"

namespace sotto::cuda {

namespace {

template <CodecKind kKind>
cudaError_t launch_kind(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params) {
  const LaunchShape shape{blocks, kThreads};
  switch (id) {
    case KernelId::kQuantEncode:
      return launch<quant_encode<QuantTensors<kKind>>>(shape, stream, params);
    case KernelId::kQuantServer:
      return launch<quant_encode<QuantRows<kKind>>>(shape, stream, params);
    case KernelId::kQuantDecode:
      return launch<run_quads<QuantDecodeKernel<kKind>>>(shape, stream, params);
    case KernelId::kQuantEncodeUndo:
      return launch<run_quads<QuantUndoKernel<kKind>>>(shape, stream, params);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_quant(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params) {
  switch (params.arguments<QuantArgs>().kind) {
    case CodecKind::kBf16: return launch_kind<CodecKind::kBf16>(stream, id, blocks, params);
    case CodecKind::kFp16: return launch_kind<CodecKind::kFp16>(stream, id, blocks, params);
    case CodecKind::kInt8: return launch_kind<CodecKind::kInt8>(stream, id, blocks, params);
    case CodecKind::kInt4: return launch_kind<CodecKind::kInt4>(stream, id, blocks, params);
    case CodecKind::kOnebit: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace sotto::cuda
