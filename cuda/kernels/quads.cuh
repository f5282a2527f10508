// How kernels over pieces are executed: a thread block takes one Work, thread t every 256th quad of
// it from t on. Quads lie at multiples of 4 positions, so flat memory is read and written 128 bits
// at a time where it is aligned; many small tensors are shared by the threads like one large one.
// Where a thread block has one plain run alone, what its elements share is loaded once (Whole).
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

// What a function over elements of a quad takes in place of their number, 1 .. 4: four elements
// that are reached at once, no one masked, floats as float32.
struct Whole {
  SOTTO_HOST_DEVICE constexpr operator uint32_t() const { return kQuad; }
};

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
__device__ inline Quad<T> load_quad(const T* at, Whole) {
  return *reinterpret_cast<const Quad<T>*>(at);
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
template <class T>
__device__ inline void store_quad(T* at, Whole, const Quad<T>& x) {
  *reinterpret_cast<Quad<T>*>(at) = x;
}

// Element k becomes element k + by; by: 0 .. 3. Indices of registers are constants.
template <class T>
__device__ inline Quad<T> moved_up(const Quad<T>& x, uint32_t by) {
  const Quad<T> one = (by & 1) != 0 ? Quad<T>{{T{}, x.v[0], x.v[1], x.v[2]}} : x;
  return (by & 2) != 0 ? Quad<T>{{T{}, T{}, one.v[0], one.v[1]}} : one;
}
template <class T>
__device__ inline Quad<T> moved_down(const Quad<T>& x, uint32_t by) {
  const Quad<T> one = (by & 1) != 0 ? Quad<T>{{x.v[1], x.v[2], x.v[3], T{}}} : x;
  return (by & 2) != 0 ? Quad<T>{{one.v[2], one.v[3], T{}, T{}}} : one;
}

__device__ inline void add_quad(const Quad<float>& x, Quad<float>* to) {
#pragma unroll
  for (uint32_t k = 0; k < kQuad; ++k) to->v[k] += x.v[k];
}

// Sums over ranks: groups of 8, each from 0 in ascending order, as sum_of_ranks(). Calls
// add(partial) for every rank.
template <uint32_t kQuads, class Add>
__device__ inline void add_ranks(uint32_t world, Quad<float> (&sums)[kQuads], Add&& add) {
  for (uint32_t r = 0; r < world;) {
    Quad<float> partial[kQuads] = {};
    do add(partial);
    while (++r % 8 != 0 && r < world);
#pragma unroll
    for (uint32_t q = 0; q < kQuads; ++q) add_quad(partial[q], &sums[q]);
  }
}

// Elements 0 .. n - 1 of x become elements at .. at + n - 1 of `to`.
template <class T>
__device__ inline void put(const Quad<T>& x, uint32_t at, uint32_t n, Quad<T>* to) {
  const Quad<T> moved = moved_up(x, at);
#pragma unroll
  for (uint32_t k = 0; k < kQuad; ++k) to->v[k] = k - at < n ? moved.v[k] : to->v[k];
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
__device__ inline Quad<float> load_floats(const Floats& from, uint64_t i, Whole n) {
  return load_quad(reinterpret_cast<const float*>(from.data) + i, n);
}
__device__ inline bool plain_floats(const Floats& from) {
  return from.type == Dtype::kF32 && quad_aligned(reinterpret_cast<const float*>(from.data));
}

// Bits of a quad, in the order of bit arrays: the first one is the highest.
struct QuadBits {
  uint32_t word;
  __device__ bool operator[](uint32_t k) const { return (word & (0x80000000u >> k)) != 0; }
  // The others are 0.
  __device__ QuadBits first(uint32_t n) const { return {word & ~(0xffffffffu >> n)}; }
  // Bit k set: magnitude, else -magnitude.
  __device__ float plus_minus(uint32_t k, float magnitude) const {
    const uint32_t sign = ~(word << k) & 0x80000000u;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) ^ sign);
  }
  __device__ Quad<float> plus_minus(float magnitude) const {
    Quad<float> x;
#pragma unroll
    for (uint32_t k = 0; k < kQuad; ++k) x.v[k] = plus_minus(k, magnitude);
    return x;
  }
};

// A place in a bit array.
struct Bits {
  __device__ Bits(const uint8_t* bits, uint64_t i)
      : bytes(bits + (i >> 3)), shift(static_cast<uint32_t>(i & 7)) {}
  // Whether four bits are in one byte, here and at multiples of 4 from here.
  __device__ bool plain() const { return shift % kQuad == 0; }
  // Bits i .. i + n - 1 from here; only bytes that have some of them are read.
  __device__ QuadBits load(uint32_t i, uint32_t n) const {
    const uint32_t at = shift + i;
    uint32_t window = static_cast<uint32_t>(bytes[at >> 3]) << 24;
    if ((at & 7) + n > 8) window |= static_cast<uint32_t>(bytes[(at >> 3) + 1]) << 16;
    return {window << (at & 7)};
  }
  // i: a multiple of 8.
  __device__ QuadBits load(uint32_t i, Whole) const {
    return {static_cast<uint32_t>(bytes[i >> 3]) << (24 + shift)};
  }

  const uint8_t* bytes;
  uint32_t shift;
};

// Which of elements i .. i + n - 1 take part; all for null.
__device__ inline QuadBits load_mask(const uint8_t* valid, uint64_t i, uint32_t n) {
  if (valid == nullptr) return QuadBits{~0u}.first(n);
  return Bits(valid, i).load(0, n).first(n);
}
__device__ inline QuadBits load_mask(const uint8_t*, uint64_t, Whole) { return {~0u}; }

// Momentum of elements from one on.
struct MomentumAt {
  __device__ MomentumAt(const Momentum& m, uint64_t flat, float of_bits)
      : floats(m.bits == nullptr ? m.floats + flat : nullptr),
        bits(m.bits, m.bits == nullptr ? 0 : flat),
        magnitude(of_bits) {}
  __device__ bool plain() const { return floats != nullptr ? quad_aligned(floats) : bits.plain(); }
  template <class N>
  __device__ Quad<float> load(uint32_t i, N n) const {
    return floats != nullptr ? load_quad(floats + i, n) : bits.load(i, n).plus_minus(magnitude);
  }

  const float* floats;  // null: bits
  Bits bits;
  float magnitude;
};
__device__ inline Quad<float> load_momentum(const Momentum& m, uint64_t flat, uint32_t n,
                                            float magnitude) {
  return MomentumAt(m, flat, magnitude).load(0, n);
}

// A list operand's tensor, from the first element of the piece.
template <class T>
__device__ inline T* tensor_of(const Operand& list, const Piece& piece) {
  return list.list<T>(piece.tensor) + piece.offset;
}

__device__ inline void raise_on_device(uint32_t* target, uint32_t flags) {
  if (flags != 0 && target != nullptr) atomicOr(target, flags);
}

// Thread blocks for whose registers a multiprocessor shall have room, as far as its threads allow;
// 0: as the compiler likes.
SOTTO_HOST_DEVICE constexpr uint32_t room_for(uint32_t blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  constexpr uint32_t kThreadsAtOnce = 1024;
#elif defined(__CUDA_ARCH__) && (__CUDA_ARCH__ % 100 != 0 || __CUDA_ARCH__ >= 1200)
  constexpr uint32_t kThreadsAtOnce = 1536;
#else
  constexpr uint32_t kThreadsAtOnce = 2048;
#endif
  return blocks < kThreadsAtOnce / kThreads ? blocks : kThreadsAtOnce / kThreads;
}

// Parts of an op that most have no use for. An op belongs to one thread.
//   uint32_t quad(const Piece&, uint64_t first, uint32_t n, float* terms)
// does elements first .. first + n - 1 of a piece, n being 1 to 4. Returns the bits that are
// written, bit 3 - k for element first + k. terms[s * kStaged + k]: its term of sum s.
//
// An op with kPlain has, in place of quad(), what does many quads of a piece as well:
//   Place place(const Piece&, uint64_t first)
// what elements of a piece share, and pointers to element `first` of it;
//   bool plain(const Place&)
// whether quads may be Whole, here and at multiples of 4 elements from here;
//   void load(const Place&, uint32_t i, N n, Values (&values)[kRounds])
//   uint32_t step(const Place&, uint32_t i, N n, const Values&, float* terms)
// for elements i .. i + n - 1 from a place, N being uint32_t or Whole: load() for kRounds quads,
// each kRound elements behind the one before, and step(), which returns what quad() does, for one.
struct QuadOp {
  static constexpr uint32_t kSums = 0;     // sums of norm blocks
  static constexpr bool kBits = false;     // bits are written
  static constexpr bool kMaximum = false;  // and a maximum of `best`
  static constexpr bool kPlain = false;
  static constexpr uint32_t kAtOnce = 4;        // quads that are loaded together, of a plain run
  static constexpr uint32_t kBlocksAtOnce = 0;  // for room_for()
  __device__ float* sums(uint32_t) const { return nullptr; }
  __device__ uint8_t* bits(const Piece&, uint64_t*) const { return nullptr; }
  __device__ float* maxima() const { return nullptr; }
  __device__ void finish() {}
};

// Elements between two quads of a thread.
inline constexpr uint32_t kRound = kThreads * kQuad;
// Positions whose terms are in shared memory at once.
inline constexpr uint32_t kStaged = 4096;
inline constexpr uint32_t kQuadsPerStage = kStaged / kRound;

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

// Whether a run is all that a thread block has, of a tensor.
__device__ inline bool whole_block(const Run& run, const Piece& piece) {
  return run.count == kNormBlock && piece.tensor != kNoTensor;
}

// Where the bits of a thread block's positions are written.
struct BitsOut {
  uint8_t* bits = nullptr;
  uint64_t first = 0;  // bit of position 0

  __device__ uint8_t* at(uint32_t position) const { return bits + ((first + position) >> 3); }
  // Whether 32 positions have a word of their own.
  __device__ bool plain() const { return reinterpret_cast<uintptr_t>(at(0)) % 4 == 0; }
};

// Two neighbouring threads have the 8 bits of a byte; the first writes it, and leaves bits that do
// not belong to this call as they are. ones, present: bit 3 - k for position 4 * quad + k. All
// lanes of the warp call this.
__device__ inline void write_bits(const BitsOut& out, uint32_t position, uint32_t ones,
                                  uint32_t present) {
  const uint32_t mine = ones | present << 8;
  const uint32_t other = __shfl_xor_sync(kAllLanes, mine, 1);
  if ((position & 4) != 0) return;
  const uint32_t value = (mine & 0xfu) << 4 | (other & 0xfu);
  const uint32_t written = mine >> 8 << 4 | other >> 8;
  if (written == 0) return;
  uint8_t* at = out.at(position);
  *at = static_cast<uint8_t>(written == 0xffu ? value : (*at & ~written) | value);
}

// One step of turning a matrix of 8 x 8 nibbles, a row in each of 8 lanes: columns without kStep
// and rows with it change places.
template <uint32_t kStep>
__device__ inline uint32_t turn_nibbles(uint32_t x, uint32_t row) {
  constexpr uint32_t kLow = kStep == 4 ? 0xffffu : kStep == 2 ? 0xff00ffu : 0xf0f0f0fu;
  const bool lower = (row & kStep) == 0;
  const uint32_t other = __shfl_xor_sync(kAllLanes, x, kStep);
  const uint32_t by = lower ? 4 * kStep : 32 - 4 * kStep;
  const uint32_t keep = lower ? kLow : ~kLow;
  return (x & keep) | ((other << by | other >> (32 - by)) & ~keep);
}

// Nibble r: bits of this thread's quad of round r, of a whole block. Eight neighbouring threads
// have the 8 words of their positions and write one each. All lanes of the warp call this.
__device__ inline void write_words(const BitsOut& out, uint32_t nibbles) {
  const uint32_t row = (threadIdx.x & 7) ^ 1;  // the first quad of a byte is its upper nibble
  nibbles = turn_nibbles<4>(nibbles, row);
  nibbles = turn_nibbles<2>(nibbles, row);
  nibbles = turn_nibbles<1>(nibbles, row);
  auto* words = reinterpret_cast<uint32_t*>(out.at(0));
  words[row * (kRound / 32) + threadIdx.x / 8] = nibbles;
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

template <class Op>
__device__ inline uint32_t do_quad(Op& op, const Piece& piece, uint64_t first, uint32_t n,
                                   float* terms) {
  if constexpr (Op::kPlain) {
    const auto at = op.place(piece, first);
    typename Op::Values values[1];
    op.load(at, 0, n, values);
    return op.step(at, 0, n, values[0], terms);
  } else {
    return op.quad(piece, first, n, terms);
  }
}

// One half of the block's positions.
template <class Op>
__device__ inline void run_half(const Params& params, const Work& work, Op& op, uint32_t half,
                                uint32_t end, const BitsOut& out, float* stage) {
  const Run* table = params.runs + work.first_run;
  for (uint32_t i = 0; i < kQuadsPerStage; ++i) {
    const uint32_t staged = (i * kThreads + threadIdx.x) * kQuad;
    const uint32_t position = half * kStaged + staged;
    if (half * kStaged + i * kRound >= end) return;  // the same for all threads
    if constexpr (Op::kSums != 0) {
#pragma unroll
      for (uint32_t s = 0; s < Op::kSums; ++s)
        store_quad(stage + s * kStaged + staged, Whole(), Quad<float>{});
    }
    uint32_t ones = 0, present = 0;
    visit_quad(table, work.runs, position, [&](const Run& run, uint32_t begin, uint32_t n) {
      const Piece& piece = params.pieces[run.piece];
      const uint32_t at = begin - position;
      const uint32_t here = 0xfu & ~(0xfu >> n);
      uint32_t set = here;  // padding
      if (piece.tensor != kNoTensor) {
        float* terms = Op::kSums != 0 ? stage + staged + at : nullptr;
        set = do_quad(op, piece, run.first + (begin - run.position), n, terms);
      }
      ones |= (set & here) >> at;
      present |= here >> at;
    });
    if constexpr (Op::kBits) write_bits(out, position, ones, present);
  }
}

// The same of a plain run of kNormBlock elements. Returns the bits: nibble r of round r.
template <class Op>
__device__ inline uint32_t run_plain_half(Op& op, const typename Op::Place& at, uint32_t half,
                                          float* stage) {
  uint32_t nibbles = 0;
#pragma unroll
  for (uint32_t i = 0; i < kQuadsPerStage; i += Op::kAtOnce) {
    const uint32_t first = half * kStaged + i * kRound;
    typename Op::Values values[Op::kAtOnce];
    op.load(at, first, Whole(), values);
#pragma unroll
    for (uint32_t k = 0; k < Op::kAtOnce; ++k) {
      float* terms = stage + (i + k) * kRound + threadIdx.x * kQuad;
      nibbles |= op.step(at, first + k * kRound, Whole(), values[k], terms) << 4 * (i + k);
    }
  }
  return nibbles << half * 4 * kQuadsPerStage;
}

// Thread t < 64 * kSums is lane t % 64 of sum t / 64. Returns the lane with the staged terms added.
template <class Op>
__device__ inline float add_staged(const float* stage, uint32_t half, uint32_t end, float lane) {
  if (threadIdx.x >= Op::kSums * kNormLanes) return lane;
  const float* from = stage + threadIdx.x / kNormLanes * kStaged + threadIdx.x % kNormLanes;
  // Rows that were staged: whole rounds of all threads.
  const uint32_t left = end - half * kStaged;
  const uint32_t staged = left >= kStaged ? kStaged : (left + kRound - 1) / kRound * kRound;
#pragma unroll 8
  for (uint32_t at = 0; at < staged; at += static_cast<uint32_t>(kNormLanes)) lane += from[at];
  return lane;
}

// Calls run(half) for both halves of `end` positions. Returns this thread's lane.
template <class Op, class RunHalf>
__device__ inline float run_halves(uint32_t end, const float* stage, RunHalf&& run) {
  float lane = 0.0f;
#pragma unroll 1
  for (uint32_t half = 0; half * kStaged < end; ++half) {
    run(half);
    if constexpr (Op::kSums != 0) {
      __syncthreads();
      lane = add_staged<Op>(stage, half, end, lane);
      __syncthreads();
    }
  }
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

// Where a thread block writes bits. Loaded where it is used, so that it takes no registers between.
template <class Op>
__device__ inline BitsOut bits_out(const Params& params, const Op& op) {
  BitsOut out;
  if constexpr (Op::kBits) {
    const Run run = params.runs[params.work[blockIdx.x].first_run];
    out.bits = op.bits(params.pieces[run.piece], &out.first);
    out.first += run.first - run.position;
  }
  return out;
}

// The positions of a thread block, where it has one plain run of kNormBlock elements. False: it
// has not, and nothing was done.
template <class Op>
__device__ inline bool run_plain(const Params& params, Op& op, float* stage, float* lane) {
  if constexpr (Op::kPlain) {
    const Run run = params.runs[params.work[blockIdx.x].first_run];
    const Piece& piece = params.pieces[run.piece];
    if (!whole_block(run, piece)) return false;
    const auto at = op.place(piece, run.first + threadIdx.x * kQuad);
    if (!op.plain(at) || !bits_out(params, op).plain()) return false;
    uint32_t nibbles = 0;
    *lane = run_halves<Op>(kNormBlock, stage,
                           [&](uint32_t half) { nibbles |= run_plain_half(op, at, half, stage); });
    if constexpr (Op::kBits) write_words(bits_out(params, op), nibbles);
    return true;
  }
  return false;
}

template <class Op>
__device__ inline float run_parts(const Params& params, Op& op, float* stage) {
  const Work work = params.work[blockIdx.x];
  const Run last = params.runs[work.first_run + work.runs - 1];
  const uint32_t end = last.position + last.count;
  const BitsOut out = bits_out(params, op);
  return run_halves<Op>(end, stage,
                        [&](uint32_t half) { run_half(params, work, op, half, end, out, stage); });
}

template <class Op>
__global__ void __launch_bounds__(kThreads, room_for(Op::kBlocksAtOnce))
    run_quads(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  __shared__ Stage<Op::kSums> stage;
  __shared__ uint32_t maximum;
  Op op(params);
  if constexpr (Op::kMaximum) {
    if (threadIdx.x == 0) maximum = 0;
    __syncthreads();
  }
  float lane = 0.0f;
  if (!run_plain(params, op, stage.terms, &lane)) lane = run_parts(params, op, stage.terms);
  const uint64_t block = params.work[blockIdx.x].block;
  if constexpr (Op::kSums != 0) fold_lanes(op, block, lane, stage.terms);
  if constexpr (Op::kMaximum) {
    atomicMax(&maximum, op.best);
    __syncthreads();
    if (threadIdx.x == 0) op.maxima()[block] = std::bit_cast<float>(maximum);
  }
  op.finish();
}

}  // namespace sotto::cuda
