// What a kernel gets: operands, the arguments of the call, and the tables that prepare() has made.
// Shared by the host, which fills it, and kernels, which read it.
#pragma once

#include <cstdint>

#include "core/kernels/families.h"
#include "cuda/kernels/kernels.h"

namespace sotto::cuda {

// Threads of a block, and what each does at once: a quad is 4 elements at a multiple of 4
// positions.
inline constexpr uint32_t kThreads = 256;
inline constexpr uint32_t kQuad = 4;
inline constexpr uint32_t kQuadsPerThread = static_cast<uint32_t>(kNormBlock) / kQuad / kThreads;

// Thread blocks that set or copy so many bytes: enough to fill a device, and no more.
constexpr uint32_t byte_blocks(uint64_t bytes) {
  constexpr uint64_t kPerBlock = uint64_t{kThreads} * 16 * 4;
  constexpr uint64_t kMost = 1024;
  const uint64_t blocks = (bytes + kPerBlock - 1) / kPerBlock;
  return static_cast<uint32_t>(blocks < kMost ? blocks : kMost);
}
// Thread blocks for so many ranges, a warp each.
inline constexpr uint32_t kRangesPerBlock = kThreads / 32;
constexpr uint64_t range_blocks(uint64_t ranges) {
  return (ranges + kRangesPerBlock - 1) / kRangesPerBlock;
}

// Consecutive elements of one piece, at consecutive positions of the work of one thread block.
struct Run {
  uint64_t first;     // element of the piece
  uint32_t piece;     // index
  uint32_t count;     // elements
  uint32_t position;  // of the first, 0 .. kNormBlock - 1
  uint32_t reserved;
};

// What one thread block does: runs at ascending positions below kNormBlock. Where block sums are
// made, a norm block and its positions.
struct Work {
  uint64_t block;  // index of the norm block
  uint32_t first_run;
  uint32_t runs;
};

struct Params {
  Operand operands[kMaxOperands];
  const Piece* pieces;
  const Run* runs;
  const Work* work;
  const NormRange* ranges;   // NormArgs, TensorArgs, ScalingArgs
  const uint64_t* sections;  // GateArgs
  const uint32_t* predicate;
  uint64_t bytes;
  uint32_t expect;
  bool paired_ran;
  alignas(8) unsigned char args[kMaxArgBytes];

  template <class T>
  SOTTO_HOST_DEVICE const T& arguments() const {
    static_assert(sizeof(T) <= kMaxArgBytes && alignof(T) <= 8);
    return *reinterpret_cast<const T*>(args);
  }
  // The operands of a call of K.
  template <class K>
  SOTTO_HOST_DEVICE const typename K::template Operands<Operand>& of() const {
    return named<K>(operands);
  }
  // Whether the kernel runs at all.
  SOTTO_HOST_DEVICE bool holds() const {
    return predicate == nullptr || word_of(predicate) == expect;
  }

  // Also of a word that the host may be writing.
  SOTTO_HOST_DEVICE static uint32_t word_of(const uint32_t* word) {
#if defined(__CUDA_ARCH__)
    return *static_cast<const volatile uint32_t*>(word);
#else
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
  }
};

}  // namespace sotto::cuda
