// The reduction over ranks of one element (kReduce), for every device.
#pragma once

#include <limits>
#include <type_traits>

#include "core/base/dtype.h"
#include "core/kernels/call.h"

namespace sotto {

// How a dtype is stored, in which type it is added, and how the result is rounded back. A NaN
// result is always the quiet NaN without payload, so that the bits do not depend on which operand a
// processor propagates.
template <class T>
struct PlainElement {
  using Stored = T;
  using Wide = T;
  SOTTO_HOST_DEVICE static Wide widen(T x) { return x; }
  SOTTO_HOST_DEVICE static T narrow(Wide x) {
    if constexpr (std::is_floating_point_v<T>) {
      if (x != x) return std::numeric_limits<T>::quiet_NaN();
    }
    return x;
  }
  SOTTO_HOST_DEVICE static bool finite(T x) {
    if constexpr (std::is_floating_point_v<T>) return x - x == 0;
    return true;
  }
};

struct HalfElement {
  using Stored = uint16_t;
  using Wide = float;
  SOTTO_HOST_DEVICE static float widen(uint16_t x) { return f16_to_f32(x); }
  SOTTO_HOST_DEVICE static uint16_t narrow(float x) { return x != x ? 0x7e00u : f32_to_f16(x); }
  SOTTO_HOST_DEVICE static bool finite(uint16_t x) { return (x & 0x7c00u) != 0x7c00u; }
};

struct BrainElement {
  using Stored = uint16_t;
  using Wide = float;
  SOTTO_HOST_DEVICE static float widen(uint16_t x) { return bf16_to_f32(x); }
  SOTTO_HOST_DEVICE static uint16_t narrow(float x) { return x != x ? 0x7fc0u : f32_to_bf16(x); }
  SOTTO_HOST_DEVICE static bool finite(uint16_t x) { return (x & 0x7f80u) != 0x7f80u; }
};

// In which type the elements of all ranks are combined. The sum of a mean of integers fits: at most
// 2^16 ranks, and 64 bits hold the sums of 32-bit integers.
__extension__ typedef __int128 Int128;
template <ReduceOp kOp, class Wide>
using Accumulator =
    std::conditional_t<kOp == ReduceOp::kMean && std::is_integral_v<Wide>,
                       std::conditional_t<sizeof(Wide) == 8, Int128, int64_t>, Wide>;

// Unsigned arithmetic wraps around; signed overflow would be undefined. At least unsigned int, so
// that promotion does not make it signed again.
template <class T>
using Wrapping = std::common_type_t<std::make_unsigned_t<T>, unsigned>;

template <ReduceOp kOp, class T>
SOTTO_HOST_DEVICE inline T combine(T acc, T x) {
  if constexpr (kOp == ReduceOp::kBitOr) {
    return static_cast<T>(acc | x);
  } else if constexpr (kOp == ReduceOp::kMin || kOp == ReduceOp::kMax) {
    if constexpr (std::is_floating_point_v<T>) {
      if (acc != acc) return acc;
      if (x != x) return x;
    }
    return (kOp == ReduceOp::kMin ? x < acc : x > acc) ? x : acc;
  } else if constexpr (std::is_floating_point_v<T>) {
    return kOp == ReduceOp::kProd ? acc * x : acc + x;
  } else if constexpr (kOp == ReduceOp::kMean) {
    return acc + x;  // in an Accumulator, without overflow
  } else {
    const auto a = static_cast<Wrapping<T>>(acc);
    const auto b = static_cast<Wrapping<T>>(x);
    return static_cast<T>(kOp == ReduceOp::kProd ? a * b : a + b);
  }
}

// Behind the last rank that is combined with `first` before they join the result
// (ReduceArgs::group).
SOTTO_HOST_DEVICE inline uint32_t end_of_group(uint32_t first, uint32_t group, uint32_t world) {
  return group == 0 || world - first < group ? world : first + group;
}

// The mean of an Accumulator. Integers: towards zero, and always a number of their own type.
template <class Sum>
SOTTO_HOST_DEVICE inline Sum divide(Sum sum, uint32_t world) {
  return sum / static_cast<Sum>(world);
}

}  // namespace sotto
