#include "cuda/kernels/bytes.cuh"

#include "cuda/kernels/families.h"

namespace sotto::cuda {

// 16 bytes at once.
struct alignas(16) Chunk {
  uint64_t low, high;
};

// All threads of the grid together: chunk(i) for 16 bytes from byte i on, where dst + i is a
// multiple of 16, and byte(i) for those before and after. chunks false: bytes only.
template <class Byte, class Whole>
__device__ inline void visit_bytes(const uint8_t* dst, uint64_t bytes, bool chunks, Byte&& byte,
                                   Whole&& chunk) {
  const uint64_t thread = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const uint64_t threads = uint64_t{gridDim.x} * kThreads;
  const uint64_t to_border = (16 - reinterpret_cast<uintptr_t>(dst) % 16) % 16;
  const uint64_t head = !chunks || to_border > bytes ? bytes : to_border;
  const uint64_t whole = (bytes - head) / 16;
  for (uint64_t i = thread; i < head; i += threads) byte(i);
#pragma unroll 4
  for (uint64_t i = thread; i < whole; i += threads) chunk(head + 16 * i);
  for (uint64_t i = head + 16 * whole + thread; i < bytes; i += threads) byte(i);
}

__global__ void __launch_bounds__(kThreads) fill_bytes(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  uint8_t* dst = params.of<kernels::Fill>().out.flat<uint8_t>();
  const uint8_t value = params.arguments<FillArgs>().value;
  const uint64_t word = value * 0x0101010101010101ull;
  visit_bytes(
      dst, params.bytes, true, [&](uint64_t i) { dst[i] = value; },
      [&](uint64_t i) {
        *reinterpret_cast<Chunk*>(dst + i) = {word, word};
      });
}

// Operands: destination, source.
__global__ void __launch_bounds__(kThreads) copy_bytes(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  uint8_t* dst = params.operands[0].flat<uint8_t>();
  const uint8_t* src = params.operands[1].flat<const uint8_t>();
  const bool together =
      (reinterpret_cast<uintptr_t>(dst) - reinterpret_cast<uintptr_t>(src)) % 16 == 0;
  visit_bytes(
      dst, params.bytes, together, [&](uint64_t i) { dst[i] = src[i]; },
      [&](uint64_t i) {
        *reinterpret_cast<Chunk*>(dst + i) = *reinterpret_cast<const Chunk*>(src + i);
      });
}

// Operand: a word in memory of the host, which that reads at any time.
__global__ void __launch_bounds__(1) count_up(const __grid_constant__ Params params) {
  auto* const word = params.operands[0].flat<uint32_t>();
#if defined(__CUDA_ARCH__)
  __threadfence_system();
  *static_cast<volatile uint32_t*>(word) = Params::word_of(word) + 1;
  __threadfence_system();
#else
  __atomic_fetch_add(word, 1, __ATOMIC_SEQ_CST);
#endif
}

namespace {

template <template <class> class Kernel>
cudaError_t launch_width(cudaStream_t stream, uint32_t blocks, const Params& params) {
  const LaunchShape shape{blocks, kThreads};
  switch (params.arguments<PackArgs>().element_bytes) {
    case 1: return launch<run_quads<Kernel<uint8_t>>>(shape, stream, params);
    case 2: return launch<run_quads<Kernel<uint16_t>>>(shape, stream, params);
    case 4: return launch<run_quads<Kernel<uint32_t>>>(shape, stream, params);
    case 8: return launch<run_quads<Kernel<uint64_t>>>(shape, stream, params);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_bytes(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params) {
  const LaunchShape shape{blocks, kThreads};
  switch (id) {
    case KernelId::kFill: return launch<fill_bytes>(shape, stream, params);
    case KernelId::kPack: return launch_width<PackKernel>(stream, blocks, params);
    case KernelId::kUnpack: return launch_width<UnpackKernel>(stream, blocks, params);
    case KernelId::kConvert: return launch<run_quads<ConvertKernel>>(shape, stream, params);
    case KernelId::kAccumulate: return launch<run_quads<AccumulateKernel>>(shape, stream, params);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t launch_count(cudaStream_t stream, const Params& params) {
  return launch<count_up>({1, 1}, stream, params);
}

cudaError_t launch_copy_bytes(cudaStream_t stream, uint32_t blocks, const Params& params) {
  return launch<copy_bytes>({blocks, kThreads}, stream, params);
}

}  // namespace sotto::cuda
