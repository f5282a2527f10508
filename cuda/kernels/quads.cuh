// How kernels over pieces are executed: a thread block takes one Work, thread t every 256th quad of
// it from t on. Quads lie at multiples of 4 positions, so flat memory is read and written 128 bits
// at a time where it is aligned; many small tensors are shared by the threads like one large one.
//
// Sums of norm blocks keep the one order of core/kernels/call.h: all threads write the terms of
// elements to shared memory, then 64 threads are the 64 lanes and add them in ascending position.
// What takes no part is +0, which changes no sum.
#pragma once

#include <cstdint>

#include "core/kernels/elements.h"
#include "cuda/kernels/tables.h"

namespace sotto::cuda {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

// Four values that are loaded and stored at once.
template <class T>
struct alignas(sizeof(T) * kQuad > 16 ? 16 : sizeof(T) * kQuad) Quad {
  T v[kQuad];
};

template <class T>
__device__ inline bool quad_aligned(const T* at) {
  return reinterpret_cast<uintptr_t>(at) % alignof(Quad<T>) == 0;
}

// n: 1 .. 4 elements; the others are 0.
template <class T>
__device__ inline Quad<T> load_quad(const T* at, uint32_t n) {
  if (n == kQuad && quad_aligned(at)) return *reinterpret_cast<const Quad<T>*>(at);
  Quad<T> x{};
#pragma unroll
  for (uint32_t k = 0; k < kQuad; ++k) {
    if (k < n) x.v[k] = at[k];
  }
  return x;
}

template <class T>
__device__ inline void store_quad(T* at, uint32_t n, const Quad<T>& x) {
  if (n == kQuad && quad_aligned(at)) {
    *reinterpret_cast<Quad<T>*>(at) = x;
    return;
  }
#pragma unroll
  for (uint32_t k = 0; k < kQuad; ++k) {
    if (k < n) at[k] = x.v[k];
  }
}

// Elements i .. i + n - 1 as float32.
__device__ inline Quad<float> load_floats(const Floats& from, uint64_t i, uint32_t n) {
  if (from.type == Dtype::kF32) return load_quad(reinterpret_cast<const float*>(from.data) + i, n);
  const Quad<uint16_t> raw = load_quad(reinterpret_cast<const uint16_t*>(from.data) + i, n);
  Quad<float> x;
#pragma unroll
  for (uint32_t k = 0; k < kQuad; ++k)
    x.v[k] = from.type == Dtype::kBF16 ? bf16_to_f32(raw.v[k]) : f16_to_f32(raw.v[k]);
  return x;
}

// Bit k: bit i + k of the array, for k < n; all ones for null (nothing is masked).
__device__ inline uint32_t load_bits(const uint8_t* bits, uint64_t i, uint32_t n) {
  if (bits == nullptr) return 0xfu;
  const uint32_t shift = static_cast<uint32_t>(i & 7);
  uint32_t window = static_cast<uint32_t>(bits[i >> 3]) << 8;
  if (shift + n > 8) window |= bits[(i >> 3) + 1];
  uint32_t out = 0;
#pragma unroll
  for (uint32_t k = 0; k < kQuad; ++k) out |= (window >> (15 - shift - k) & 1u) << k;
  return out;
}

// Momentum of four elements.
__device__ inline Quad<float> load_momentum(const Momentum& m, uint64_t flat, uint32_t n,
                                            float magnitude) {
  if (m.bits == nullptr) return load_quad(m.floats + flat, n);
  const uint32_t ones = load_bits(m.bits, flat, n);
  Quad<float> x;
#pragma unroll
  for (uint32_t k = 0; k < kQuad; ++k) x.v[k] = plus_minus(ones >> k & 1, magnitude);
  return x;
}

// A list operand's tensor, from the first element of the piece.
template <class T>
__device__ inline T* tensor_of(const Operand& list, const Piece& piece) {
  return list.list<T>(piece.tensor) + piece.offset;
}

__device__ inline void raise_on_device(uint32_t* target, uint32_t flags) {
  if (flags != 0 && target != nullptr) atomicOr(target, flags);
}

// Parts of an op that most have no use for. An op belongs to one thread.
//   uint32_t quad(const Piece&, uint64_t first, uint32_t n, float* terms)
// does elements first .. first + n - 1 of a piece, n being 1 to 4. Returns the bits that are
// written, bit k for element first + k. terms[s * kStaged + k]: its term of sum s.
struct QuadOp {
  static constexpr uint32_t kSums = 0;     // sums of norm blocks
  static constexpr bool kBits = false;     // bits are written
  static constexpr bool kMaximum = false;  // and a maximum of `best`
  __device__ float* sums(uint32_t) const { return nullptr; }
  __device__ uint8_t* bits(const Piece&, uint64_t*) const { return nullptr; }
  __device__ float* maxima() const { return nullptr; }
  __device__ void finish() {}
};

// Positions whose terms are in shared memory at once.
inline constexpr uint32_t kStaged = 4096;
inline constexpr uint32_t kQuadsPerStage = kStaged / kQuad / kThreads;

// The first run that ends behind `position`, below `runs`; `runs` if there is none.
__device__ inline uint32_t first_run_behind(const Run* table, uint32_t runs, uint32_t position) {
  uint32_t low = 0, high = runs;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (table[middle].position + table[middle].count > position) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Calls visit(run, first position, count) for the parts of a quad that belong to runs.
template <class Visit>
__device__ inline void visit_quad(const Run* table, uint32_t runs, uint32_t position,
                                  Visit&& visit) {
  for (uint32_t r = first_run_behind(table, runs, position); r < runs; ++r) {
    const Run run = table[r];
    if (run.position >= position + kQuad) return;
    const uint32_t begin = run.position > position ? run.position : position;
    const uint32_t run_end = run.position + run.count;
    const uint32_t end = run_end < position + kQuad ? run_end : position + kQuad;
    visit(run, begin, end - begin);
  }
}

// Two neighbouring threads have the 8 bits of a byte; the first writes it, and leaves bits that do
// not belong to this call as they are. ones, present: bit k for position 4 * quad + k. All lanes of
// the warp call this.
__device__ inline void write_bits(uint8_t* bits, uint64_t first_bit, uint32_t position,
                                  uint32_t ones, uint32_t present) {
  const uint32_t mine = ones | present << 8;
  const uint32_t other = __shfl_xor_sync(kAllLanes, mine, 1);
  if ((position & 4) != 0) return;
  const uint32_t value = __brev((mine & 0xfu) | (other & 0xfu) << 4) >> 24;
  const uint32_t written = __brev(mine >> 8 | other >> 8 << 4) >> 24;
  if (written == 0) return;
  uint8_t* at = bits + ((first_bit + position) >> 3);
  *at = static_cast<uint8_t>(written == 0xffu ? value : (*at & ~written) | value);
}

// Terms of up to 4096 positions of each sum.
template <uint32_t kSums>
struct alignas(16) Stage {
  float terms[kSums * kStaged];
};
template <>
struct Stage<0> {
  float terms[1];
};

// One half of the block's positions.
template <class Op>
__device__ inline void run_half(const Params& params, const Work& work, Op& op, uint32_t half,
                                uint32_t end, uint64_t first_bit, uint8_t* bits, float* stage) {
  const Run* table = params.runs + work.first_run;
  for (uint32_t i = 0; i < kQuadsPerStage; ++i) {
    const uint32_t staged = (i * kThreads + threadIdx.x) * kQuad;
    const uint32_t position = half * kStaged + staged;
    if (half * kStaged + i * kThreads * kQuad >= end) return;  // the same for all threads
    if constexpr (Op::kSums != 0) {
#pragma unroll
      for (uint32_t s = 0; s < Op::kSums; ++s)
        store_quad(stage + s * kStaged + staged, kQuad, Quad<float>{});
    }
    uint32_t ones = 0, present = 0;
    visit_quad(table, work.runs, position, [&](const Run& run, uint32_t begin, uint32_t n) {
      const Piece& piece = params.pieces[run.piece];
      const uint32_t at = begin - position;
      const uint32_t here = (1u << n) - 1u;
      uint32_t set = here;  // padding
      if (piece.tensor != kNoTensor) {
        float* terms = Op::kSums != 0 ? stage + staged + at : nullptr;
        set = op.quad(piece, run.first + (begin - run.position), n, terms);
      }
      ones |= (set & here) << at;
      present |= here << at;
    });
    if constexpr (Op::kBits) write_bits(bits, first_bit, position, ones, present);
  }
}

// Thread t < 64 * kSums is lane t % 64 of sum t / 64. Returns the lane with the staged terms added.
template <class Op>
__device__ inline float add_staged(const float* stage, uint32_t half, uint32_t end, float lane) {
  if (threadIdx.x >= Op::kSums * kNormLanes) return lane;
  const float* from = stage + threadIdx.x / kNormLanes * kStaged + threadIdx.x % kNormLanes;
  // Rows that were staged: whole rounds of all threads.
  const uint32_t left = end - half * kStaged;
  const uint32_t round = kThreads * kQuad;
  const uint32_t staged = left >= kStaged ? kStaged : (left + round - 1) / round * round;
#pragma unroll 8
  for (uint32_t at = 0; at < staged; at += static_cast<uint32_t>(kNormLanes)) lane += from[at];
  return lane;
}

// Lanes are folded by halves; one thread per sum stores the result.
template <class Op>
__device__ inline void fold_lanes(const Op& op, uint64_t block, float lane, float* shared) {
  if (threadIdx.x < Op::kSums * kNormLanes) shared[threadIdx.x] = lane;
  __syncthreads();
  const uint32_t sum = threadIdx.x / kNormLanes;
  const uint32_t index = threadIdx.x % kNormLanes;
  if (sum >= Op::kSums || index >= 32) return;  // whole warps
  float total = lane + shared[threadIdx.x + 32];
#pragma unroll
  for (uint32_t half = 16; half != 0; half /= 2) total += __shfl_down_sync(kAllLanes, total, half);
  if (index == 0 && op.sums(sum) != nullptr) op.sums(sum)[block] = total;
}

template <class Op>
__global__ void __launch_bounds__(kThreads) run_quads(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  __shared__ Stage<Op::kSums> stage;
  __shared__ uint32_t maximum;
  Op op(params);
  const Work work = params.work[blockIdx.x];
  const Run last = params.runs[work.first_run + work.runs - 1];
  const uint32_t end = last.position + last.count;
  uint64_t first_bit = 0;
  uint8_t* bits = nullptr;
  if constexpr (Op::kBits) {
    const Run run = params.runs[work.first_run];
    bits = op.bits(params.pieces[run.piece], &first_bit);
    first_bit += run.first - run.position;
  }
  if constexpr (Op::kMaximum) {
    if (threadIdx.x == 0) maximum = 0;
    __syncthreads();
  }
  float lane = 0.0f;
  for (uint32_t half = 0; half * kStaged < end; ++half) {
    run_half(params, work, op, half, end, first_bit, bits, stage.terms);
    if constexpr (Op::kSums != 0) {
      __syncthreads();
      lane = add_staged<Op>(stage.terms, half, end, lane);
      __syncthreads();
    }
  }
  if constexpr (Op::kSums != 0) fold_lanes(op, work.block, lane, stage.terms);
  if constexpr (Op::kMaximum) {
    atomicMax(&maximum, op.best);
    __syncthreads();
    if (threadIdx.x == 0) op.maxima()[work.block] = std::bit_cast<float>(maximum);
  }
  op.finish();
}

}  // namespace sotto::cuda
