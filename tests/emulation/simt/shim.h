// A test tool: what CUDA C++ source sees when it is compiled as plain C++ for the emulator
// (simt.h). Included before everything else (-include), since CUDA's headers define the words of
// the language only where none has.
#pragma once
#if defined(__CUDACC__)
#error "shim.h is for host compilers"
#endif

#define SOTTO_SIMT 1
#define __shared__ static thread_local
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tests/emulation/simt/registry.h"
#include "tests/emulation/simt/simt.h"

static constexpr int warpSize = 32;

// Dynamic shared memory as an array of T.
#define SIMT_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(::simt::dynamic_shared())

#define SIMT_AT const ::simt::Location& at = ::simt::Location::current()

inline void __syncthreads(SIMT_AT) { simt::block_barrier(simt::BarrierResult::kNone, false, at); }
inline int __syncthreads_count(int predicate, SIMT_AT) {
  return simt::block_barrier(simt::BarrierResult::kCount, predicate != 0, at);
}
inline int __syncthreads_and(int predicate, SIMT_AT) {
  return simt::block_barrier(simt::BarrierResult::kAnd, predicate != 0, at);
}
inline int __syncthreads_or(int predicate, SIMT_AT) {
  return simt::block_barrier(simt::BarrierResult::kOr, predicate != 0, at);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_AT) {
  simt::warp_collective(simt::Collective::kSync, mask, 0, 0, at);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_AT) {
  return static_cast<unsigned>(
      simt::warp_collective(simt::Collective::kBallot, mask, predicate != 0, 0, at));
}
inline int __any_sync(unsigned mask, int predicate, SIMT_AT) {
  return __ballot_sync(mask, predicate, at) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SIMT_AT) {
  return __ballot_sync(mask, predicate == 0, at) == 0;
}

namespace simt {

template <class T>
T shuffle(unsigned mask, T value, int source, int width, const Location& at) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  if (width <= 0 || width > 32 || (width & (width - 1)) != 0)
    misuse("a shuffle's width is a power of two up to 32", at);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = warp_collective(Collective::kShuffle, mask, bits, static_cast<uint32_t>(source), at);
  T result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

}  // namespace simt

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_AT) {
  const int base = static_cast<int>(simt::lane_index()) & ~(width - 1);
  return simt::shuffle(mask, value, base + (source & (width - 1)), width, at);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, SIMT_AT) {
  const int lane = static_cast<int>(simt::lane_index()), source = lane ^ lanes;
  const bool above = source >= (lane & ~(width - 1)) + width;
  return simt::shuffle(mask, value, above ? lane : source, width, at);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_AT) {
  const int lane = static_cast<int>(simt::lane_index()), by = static_cast<int>(delta);
  const bool above = (lane & (width - 1)) + by >= width;
  return simt::shuffle(mask, value, above ? lane : lane + by, width, at);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_AT) {
  const int lane = static_cast<int>(simt::lane_index()), by = static_cast<int>(delta);
  const bool below = (lane & (width - 1)) < by;
  return simt::shuffle(mask, value, below ? lane : lane - by, width, at);
}

// Memory is sequentially consistent here.
inline void __threadfence() { asm volatile("" ::: "memory"); }
inline void __threadfence_block() { asm volatile("" ::: "memory"); }
inline void __threadfence_system() { asm volatile("" ::: "memory"); }

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= ((x >> i) & 1u) << (31 - i);
  return reversed;
}

template <class T>
T atomicAdd(T* at, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*at).fetch_add(value, std::memory_order_relaxed);
}
template <class T>
T atomicOr(T* at, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*at).fetch_or(value, std::memory_order_relaxed);
}
template <class T>
T atomicAnd(T* at, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*at).fetch_and(value, std::memory_order_relaxed);
}
template <class T>
T atomicExch(T* at, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*at).exchange(value, std::memory_order_relaxed);
}
template <class T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  std::atomic_ref<T>(*at).compare_exchange_strong(expected, value, std::memory_order_relaxed);
  return expected;
}
template <class T>
T atomicMax(T* at, std::type_identity_t<T> value) {
  std::atomic_ref<T> cell(*at);
  T old = cell.load(std::memory_order_relaxed);
  while (old < value && !cell.compare_exchange_weak(old, value, std::memory_order_relaxed)) {
  }
  return old;
}
template <class T>
T atomicMin(T* at, std::type_identity_t<T> value) {
  std::atomic_ref<T> cell(*at);
  T old = cell.load(std::memory_order_relaxed);
  while (value < old && !cell.compare_exchange_weak(old, value, std::memory_order_relaxed)) {
  }
  return old;
}
