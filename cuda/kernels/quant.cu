#include "cuda/kernels/quant.cuh"

#include <string_view>

#include "cuda/kernels/families.h"

namespace sotto::cuda {
namespace {

// kOurs: whether it is a codec whose coding is `quant`.
template <CodecKind kKind, bool kOurs>
cudaError_t launch_kind(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params) {
  if constexpr (kOurs) {
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
      default: break;
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_quant(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params) {
  constexpr std::string_view kOurs = "quant";
  switch (params.arguments<QuantArgs>().kind) {
#define SOTTO_CODEC(type, number, words, bits, block, scales, sparse, residual, coding) \
  case CodecKind::k##type:                                                              \
    return launch_kind<CodecKind::k##type, kOurs == #coding>(stream, id, blocks, params);
#include "core/base/codecs.def"
  }
  return cudaErrorInvalidValue;
}

}  // namespace sotto::cuda
