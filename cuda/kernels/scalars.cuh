// Numbers that are made once per tensor, instance or step. Block sums are added in float64 as if by
// one thread in ascending order, which many threads do with integers: where no partial sum can
// round any order gives those bits, else sums are rounded as Rounding says.
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
  // Inclusive, in the order of lanes.
  template <class T>
  __device__ T scan(T value) const {
#pragma unroll
    for (uint32_t lanes = 1; lanes < kWarpThreads; lanes *= 2) {
      const T before = value.from_below(lanes);
      if (rank() >= lanes) value = before.then(value);
    }
    return value;
  }
  // Values that have one lane of scan_rows().
  static constexpr uint32_t kRow = 1;
  template <class T>
  __device__ T scan_rows(T value) const {
    return scan(value);
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
  static constexpr uint32_t kRow = kWarpThreads;
  template <class T>
  __device__ T scan_rows(T value) const {
    __shared__ T of_warps[kWideThreads / kWarpThreads];
    value = WarpTeam().scan(value);
    const uint32_t lane = threadIdx.x % kWarpThreads;
    if (lane == kWarpThreads - 1) of_warps[threadIdx.x / kWarpThreads] = value;
    __syncthreads();
    value = lane < blockDim.x / kWarpThreads ? of_warps[lane] : T{};
    __syncthreads();
    return WarpTeam().scan(value);
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

// What additions make of a float64 that is not negative, as long as it stays below the next power
// of two: it is a whole number of units of its last place, and so is what each addition adds after
// rounding. A value that lies halfway between two such numbers makes the sum even, so it matters
// whether the sum was, and of nothing else. So additions can be combined before the sum is known.
struct Rounding {
  uint64_t even = 0, odd = 0;  // units that are added to an even and to an odd number of units

  __device__ uint64_t to(uint64_t units) const { return units % 2 == 0 ? even : odd; }
  __device__ Rounding then(const Rounding& next) const {
    return {even + next.to(even), odd + next.to(odd + 1)};
  }
  __device__ Rounding from_below(uint32_t lanes) const {
    return {__shfl_up_sync(kAllLanes, even, lanes), __shfl_up_sync(kAllLanes, odd, lanes)};
  }
};

// A sum, taken apart: units * 2^(field - 1075). Zero has field 0 and no units, and less than any
// float32 as its unit.
struct Units {
  static constexpr uint64_t kNextPower = uint64_t{1} << 53;
  __device__ explicit Units(double sum)
      : field(static_cast<int32_t>(std::bit_cast<uint64_t>(sum) >> 52)),
        units(std::bit_cast<uint64_t>(sum) % (kNextPower / 2) + (field != 0 ? kNextPower / 2 : 0)) {
  }
  // Of adding x; kNextPower or more if the sum would reach the next power of two by that alone.
  __device__ Rounding rounding(float x) const {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const int32_t x_field = bits >> 23 == 0 ? 1 : static_cast<int32_t>(bits >> 23);
    const uint64_t mantissa = bits % (1u << 23) + (bits >> 23 == 0 ? 0 : 1u << 23);
    const int32_t lost = field - 1075 - (x_field - 150);  // bits of x below a unit
    if (mantissa == 0 || lost >= 25) return {};
    if (lost <= 0) {
      const uint64_t whole = lost < -29 ? kNextPower : mantissa << -lost;
      return {whole, whole};
    }
    const uint64_t whole = mantissa >> lost, rest = mantissa - (whole << lost);
    const uint64_t half = uint64_t{1} << (lost - 1);
    if (rest == half) return {whole + whole % 2, whole + (whole + 1) % 2};
    const uint64_t rounded = whole + (rest > half ? 1 : 0);
    return {rounded, rounded};
  }
  __device__ double value() const {
    return std::bit_cast<double>(static_cast<uint64_t>(field) << 52 | units % (kNextPower / 2));
  }

  int32_t field;
  uint64_t units;
};

// from[0] + from[1] + ..., finite and not negative; everybody's. A tile of values, one per thread,
// is added at once as far as the sum stays below the next power of two; those of the row that takes
// it there are added one after the other. So there are few more rounds than tiles.
template <class Team>
__device__ inline double sum_in_order(const Team& team, const float* from, uint64_t count) {
  double total = 0;
  for (uint64_t first = 0; first < count;) {
    const uint64_t at = first + team.rank();
    Units sum(total);
    const Rounding rounding = team.scan_rows(at < count ? sum.rounding(from[at]) : Rounding{});
    const uint64_t after = sum.units + rounding.to(sum.units);  // the row of this lane
    const uint32_t over = __ballot_sync(kAllLanes, after >= Units::kNextPower);
    const int rows = over != 0 ? __ffs(static_cast<int>(over)) - 1 : static_cast<int>(kWarpThreads);
    const uint64_t reached = __shfl_sync(kAllLanes, after, rows != 0 ? rows - 1 : 0);
    if (rows != 0) sum.units = reached;
    total = sum.value();
    first += over != 0 ? static_cast<uint64_t>(rows) * Team::kRow : team.size();
    if (over == 0) continue;
    const uint64_t end = first + Team::kRow < count ? first + Team::kRow : count;
#pragma unroll 8
    for (; first < end; ++first) total += from[first];
  }
  return total;
}

// Sum of block sums, which are not negative; everybody's.
template <class Team>
__device__ inline double sum_blocks(const Team& team, const float* sums, uint64_t first,
                                    uint64_t count) {
  const float* from = sums + first;
  uint32_t low = 255, high = 1;
  double total = 0;
#pragma unroll 8
  for (uint64_t b = team.rank(); b < count; b += team.size()) {
    const float x = from[b];
    const auto bits = std::bit_cast<uint32_t>(x);
    total += x;
    if (bits == 0) continue;
    const uint32_t field = bits >> 23 == 0 ? 1 : bits >> 23;
    low = field < low ? field : low;
    high = field > high ? field : high;
  }
  low = team.combine(low, Smaller());
  high = team.combine(high, Larger());
  total = team.combine(total, Plus());
  // Infinities and NaN give the same in any order.
  if (low > high || high >= 255 || sums_are_exact(count, low, high)) return total;
  return sum_in_order(team, from, count);
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
