// Numbers that are made once per tensor, instance or step. Block sums are added in float64 as if by
// one thread in ascending order: where no partial sum can round, which integers decide, any order
// gives those bits, and many threads add; else they are added in order, and other threads bring
// them, so that no addition waits for memory.
#pragma once

#include "core/kernels/scalar_steps.h"
#include "cuda/kernels/quads.cuh"

namespace sotto::cuda {

inline constexpr uint32_t kWarpThreads = 32;
// Threads of kernels that have one thread block for many ranges.
inline constexpr uint32_t kWideThreads = 1024;
// Ranges with more norm blocks are added by a whole thread block.
inline constexpr uint64_t kWideRange = 1024;

// The threads of a warp, of which all call the same functions.
struct WarpTeam {
  __device__ uint32_t rank() const { return threadIdx.x % kWarpThreads; }
  __device__ uint32_t size() const { return kWarpThreads; }
  // Op combines two values in any order; the result is everybody's.
  template <class T, class Op>
  __device__ T combine(T value, Op&& op) const {
#pragma unroll
    for (int lanes = 16; lanes != 0; lanes /= 2)
      value = op(value, __shfl_xor_sync(kAllLanes, value, lanes));
    return value;
  }
  // from[0] + from[1] + ...; everybody's.
  __device__ double sum_in_order(const float* from, uint64_t count) const {
    double total = 0;
    float next = rank() < count ? from[rank()] : 0;
    for (uint64_t first = 0; first < count; first += kWarpThreads) {
      const float mine = next;
      const uint64_t at = first + kWarpThreads + rank();
      next = at < count ? from[at] : 0;
      const uint64_t left = count - first;
#pragma unroll
      for (uint32_t lane = 0; lane < kWarpThreads; ++lane) {
        const float x = __shfl_sync(kAllLanes, mine, static_cast<int>(lane));
        if (lane < left) total += x;
      }
    }
    return total;
  }
};

// The threads of a thread block: whole warps.
struct BlockTeam {
  __device__ uint32_t rank() const { return threadIdx.x; }
  __device__ uint32_t size() const { return blockDim.x; }
  template <class T, class Op>
  __device__ T combine(T value, Op&& op) const {
    __shared__ T of_warps[kWideThreads / kWarpThreads];
    value = WarpTeam().combine(value, op);
    if (threadIdx.x % kWarpThreads == 0) of_warps[threadIdx.x / kWarpThreads] = value;
    __syncthreads();
    value = of_warps[0];
    for (uint32_t w = 1; w < blockDim.x / kWarpThreads; ++w) value = op(value, of_warps[w]);
    __syncthreads();
    return value;
  }
  // As WarpTeam's: thread 0 adds one tile while all bring the next one.
  __device__ double sum_in_order(const float* from, uint64_t count) const {
    __shared__ double tiles[2][kWideThreads];
    __shared__ double sum;
    double total = 0;
    uint32_t tile = 0;
    if (rank() < count) tiles[tile][rank()] = from[rank()];
    for (uint64_t first = 0; first < count; first += size(), tile ^= 1) {
      __syncthreads();  // this tile is there, and the other one has been added
      const uint64_t at = first + size() + rank();
      if (at < count) tiles[tile ^ 1][rank()] = from[at];
      if (rank() != 0) continue;
      const uint64_t left = count - first;
      const uint32_t n = left < size() ? static_cast<uint32_t>(left) : size();
#pragma unroll 16
      for (uint32_t i = 0; i < n; ++i) total += tiles[tile][i];
    }
    if (rank() == 0) sum = total;
    __syncthreads();
    total = sum;
    __syncthreads();
    return total;
  }
};

struct Smaller {
  __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return a < b ? a : b; }
};
struct Larger {
  __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return a > b ? a : b; }
};
struct Plus {
  __device__ double operator()(double a, double b) const { return a + b; }
};

// A float32 with exponent field E (1 for subnormals) is a multiple of 2^(E-150) and below
// 2^(E-126). So n of them, with fields from `low` to `high`, add up to multiples of 2^(low-150)
// below n * 2^(high-126); float64 holds all those exactly if that is at most 2^(low-150+53).
__device__ inline bool sums_are_exact(uint64_t n, uint32_t low, uint32_t high) {
  uint32_t log2_n = 0;
  while ((uint64_t{1} << log2_n) < n) ++log2_n;
  return high - low + log2_n <= 29;
}

// Sum of block sums; everybody's.
template <class Team>
__device__ inline double sum_blocks(const Team& team, const float* sums, uint64_t first,
                                    uint64_t count) {
  const float* from = sums + first;
  uint32_t low = 255, high = 1;
  bool ordinary = true;  // finite and not negative
  double total = 0;
#pragma unroll 8
  for (uint64_t b = team.rank(); b < count; b += team.size()) {
    const float x = from[b];
    const auto bits = std::bit_cast<uint32_t>(x);
    total += x;
    if (bits == 0) continue;
    const uint32_t field = bits >> 23 == 0 ? 1 : bits >> 23;
    ordinary = ordinary && field < 255;
    low = field < low ? field : low;
    high = field > high ? field : high;
  }
  low = team.combine(low, Smaller());
  high = team.combine(high, Larger());
  const bool all_ordinary = team.combine(ordinary ? 1u : 0u, Smaller()) != 0;
  total = team.combine(total, Plus());
  if (all_ordinary && (low > high || sums_are_exact(count, low, high))) return total;
  return team.sum_in_order(from, count);
}

// Largest of block maxima, which are not negative.
template <class Team>
__device__ inline double max_blocks(const Team& team, const float* maxima, uint64_t first,
                                    uint64_t count) {
  uint32_t best = 0;
  for (uint64_t b = team.rank(); b < count; b += team.size()) {
    const auto bits = std::bit_cast<uint32_t>(maxima[first + b]);
    best = bits > best ? bits : best;
  }
  return std::bit_cast<float>(team.combine(best, Larger()));
}

// Calls visit(team, k) for ranges begin .. end - 1, by whole teams.
template <class Visit>
__device__ inline void visit_ranges(const NormRange* ranges, uint64_t begin, uint64_t end,
                                    Visit&& visit) {
  for (uint64_t k = begin; k < end; ++k) {
    if (ranges[k].blocks > kWideRange) visit(BlockTeam(), k);
  }
  const uint32_t warps = blockDim.x / kWarpThreads;
  for (uint64_t k = begin + threadIdx.x / kWarpThreads; k < end; k += warps) {
    if (ranges[k].blocks <= kWideRange) visit(WarpTeam(), k);
  }
}

}  // namespace sotto::cuda
