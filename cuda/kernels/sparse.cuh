// Selections of blocks. A thread block has the blocks of up to kNormBlock elements; a team of
// threads does one after the other. What is selected is found by its threshold: bit by bit the
// largest key that k elements reach.
#pragma once

#include "core/kernels/sparse_elements.h"
#include "cuda/kernels/scalars.cuh"

namespace sotto::cuda {

// Blocks up to this size are done by warps, others by the whole thread block.
inline constexpr uint32_t kWarpSparseBlock = 512;
inline constexpr uint32_t kSums = 8;  // lanes of a sum of magnitudes

// What a team shares.
template <uint32_t kBlock>
struct SparseShared {
  uint16_t indices[kBlock];
  uint32_t string[kBlock / 32 + 1];  // a bitmap, or upper bits, which are not longer
  double lanes[3][kSums];            // sums of all, low and high magnitudes
  uint32_t counts[kThreads / kWarpThreads];
};

struct SparseWarp : WarpTeam {
  static constexpr uint32_t kBlock = kWarpSparseBlock;
  static constexpr uint32_t kTeams = kThreads / kWarpThreads;
  __device__ uint32_t team() const { return threadIdx.x / kWarpThreads; }
  __device__ void sync() const { __syncwarp(); }
  // The sum of the values of threads before this one.
  __device__ uint32_t before(uint32_t value, uint32_t*) const {
    uint32_t sum = value;
#pragma unroll
    for (uint32_t lanes = 1; lanes < kWarpThreads; lanes *= 2) {
      const uint32_t below = __shfl_up_sync(kAllLanes, sum, lanes);
      if (rank() >= lanes) sum += below;
    }
    return sum - value;
  }
};

struct SparseThreads : BlockTeam {
  static constexpr uint32_t kBlock = kMaxSparseBlock;
  static constexpr uint32_t kTeams = 1;
  __device__ uint32_t team() const { return 0; }
  __device__ void sync() const { __syncthreads(); }
  __device__ uint32_t before(uint32_t value, uint32_t* of_warps) const {
    const uint32_t warp = threadIdx.x / kWarpThreads;
    const uint32_t inside = SparseWarp().before(value, nullptr);
    if (threadIdx.x % kWarpThreads == kWarpThreads - 1) of_warps[warp] = inside + value;
    __syncthreads();
    uint32_t sum = inside;
    for (uint32_t w = 0; w < warp; ++w) sum += of_warps[w];
    __syncthreads();
    return sum;
  }
};

struct Add {
  __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return a + b; }
};
struct Both {
  __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return a & b; }
};

// Elements that one thread has where they are in its order, of n.
struct SparseShare {
  uint32_t first, end;
  template <class Team>
  __device__ SparseShare(const Team& team, uint32_t n) {
    const uint32_t each = (n + team.size() - 1) >> log2_floor(team.size());
    first = team.rank() * each < n ? team.rank() * each : n;
    end = first + each < n ? first + each : n;
  }
};

__device__ inline void set_shared_bit(uint32_t* string, uint32_t i) {
  // Bytes of a little-endian word, the first bit of each the highest.
  atomicOr(&string[i / 32], 1u << (i / 8 % 4 * 8 + 7 - i % 8));
}

// One block. c: of its elements, in global memory, written by this team before a sync.
template <class Team>
class SparseSelection {
 public:
  using Shared = SparseShared<Team::kBlock>;
  __device__ SparseSelection(const SparseBlock& block, Shared* shared) : b_(block), s_(*shared) {}

  // Writes the indices of the k largest, ascending.
  __device__ void select(const float* c) {
    if (b_.form == SparseForm::kAll) {
      for (uint32_t j = team_.rank(); j < b_.k; j += team_.size())
        s_.indices[j] = static_cast<uint16_t>(j);
      return team_.sync();
    }
    uint32_t last = 0;  // the smallest key that is selected
    for (uint32_t bit = 0x40000000u; bit != 0; bit /= 2) {
      uint32_t reach = 0;
      for (uint32_t i = team_.rank(); i < b_.m; i += team_.size())
        reach += magnitude_bits(c[i]) >= (last | bit) ? 1 : 0;
      if (team_.combine(reach, Add()) >= b_.k) last |= bit;
    }
    const SparseShare mine(team_, b_.m);
    uint32_t above = 0, equal = 0;
    for (uint32_t i = mine.first; i < mine.end; ++i) {
      const uint32_t key = magnitude_bits(c[i]);
      above += key > last ? 1 : 0;
      equal += key == last ? 1 : 0;
    }
    const uint32_t room = b_.k - team_.combine(above, Add());  // for equal ones
    uint32_t equal_before = team_.before(equal, s_.counts);
    const uint32_t free = room > equal_before ? room - equal_before : 0;
    uint32_t at = team_.before(above + (equal < free ? equal : free), s_.counts);
    for (uint32_t i = mine.first; i < mine.end; ++i) {
      const uint32_t key = magnitude_bits(c[i]);
      if (key < last || (key == last && equal_before++ >= room)) continue;
      s_.indices[at++] = static_cast<uint16_t>(i);
    }
    team_.sync();
  }

  __device__ void write_indices(uint8_t* out) {
    if (b_.form == SparseForm::kAll) return;
    if (b_.form != SparseForm::kBitmap) write_low(out);
    if (b_.form == SparseForm::kPacked) return;
    const uint32_t bytes = b_.index_bytes - b_.low_bytes;
    clear_string(bytes);
    for (uint32_t j = team_.rank(); j < b_.k; j += team_.size()) {
      const uint32_t index = s_.indices[j];
      set_shared_bit(s_.string, b_.form == SparseForm::kBitmap ? index : (index >> b_.low) + j);
    }
    team_.sync();
    for (uint32_t i = team_.rank(); i < bytes; i += team_.size())
      out[b_.low_bytes + i] = static_cast<uint8_t>(s_.string[i / 4] >> i % 4 * 8);
    team_.sync();
  }

  // Codes and levels of the selected elements of c, which become what is left of them unless
  // keep_all. Returns flags, of the team's first thread.
  __device__ uint32_t write_values(float* c, uint8_t* codes, bool keep_all) {
    if (b_.bits == 32) {
      for (uint32_t j = team_.rank(); j < b_.k; j += team_.size()) {
        const uint32_t i = s_.indices[j];
        std::memcpy(codes + 4 * j, &c[i], 4);
        if (!keep_all) c[i] = c[i] - c[i];
      }
      team_.sync();
      return 0;
    }
    return b_.bits == 2 ? write_two_bits(c, codes, keep_all) : write_integers(c, codes, keep_all);
  }

  // The indices of a payload, and whether they are k ascending ones below m; the same for all.
  __device__ bool read_indices(const uint8_t* payload) {
    uint32_t right = 1;
    switch (b_.form) {
      case SparseForm::kAll:
        for (uint32_t j = team_.rank(); j < b_.k; j += team_.size())
          s_.indices[j] = static_cast<uint16_t>(j);
        team_.sync();
        return true;
      case SparseForm::kPacked:
        for (uint32_t j = team_.rank(); j < b_.k; j += team_.size())
          s_.indices[j] = static_cast<uint16_t>(number_at(payload, b_.low, j));
        break;
      case SparseForm::kBitmap: right = read_ones(payload, b_.m); break;
      case SparseForm::kEliasFano:
        right = read_ones(payload + b_.low_bytes, b_.k + ((b_.m - 1) >> b_.low));
        team_.sync();
        if (right == 0) return false;
        for (uint32_t j = team_.rank(); j < b_.k; j += team_.size()) {
          s_.indices[j] =
              static_cast<uint16_t>((s_.indices[j] - j) << b_.low | number_at(payload, b_.low, j));
        }
    }
    team_.sync();
    if (right == 0) return false;
    for (uint32_t j = team_.rank(); j < b_.k; j += team_.size()) {
      if (s_.indices[j] >= b_.m || (j != 0 && s_.indices[j] <= s_.indices[j - 1])) right = 0;
    }
    return team_.combine(right, Both()) != 0;
  }
  __device__ uint32_t index(uint32_t j) const { return s_.indices[j]; }
  // S(q_j^2) of a payload: eight threads are the lanes.
  __device__ double squares(const SparseValues& values) {
    if (team_.rank() < kSums) {
      double lane = 0;
      for (uint32_t j = team_.rank(); j < b_.k; j += kSums) {
        const double q = values[j];
        lane += q * q;
      }
      s_.lanes[0][team_.rank()] = lane;
    }
    team_.sync();
    double folded[kSums];
    for (uint32_t i = 0; i < kSums; ++i) folded[i] = s_.lanes[0][i];
    return fold_sum(folded);
  }

 private:
  __device__ void clear_string(uint32_t bytes) {
    for (uint32_t i = team_.rank(); i < (bytes + 3) / 4; i += team_.size()) s_.string[i] = 0;
    team_.sync();
  }
  // Low bits, or whole indices: byte by byte.
  __device__ void write_low(uint8_t* out) {
    for (uint32_t i = team_.rank(); i < b_.low_bytes; i += team_.size()) {
      uint32_t byte = 0;
      for (uint32_t bit = 8 * i; bit < 8 * i + 8; ++bit) {
        const uint32_t j = bit / b_.low;
        const uint32_t shift = b_.low - 1 - bit % b_.low;
        const uint32_t one = j < b_.k ? s_.indices[j] >> shift & 1u : 0u;
        byte = byte << 1 | one;
      }
      out[i] = static_cast<uint8_t>(byte);
    }
  }
  // The positions of ones become indices, k at most. Returns 1 if there are k.
  __device__ uint32_t read_ones(const uint8_t* bytes, uint32_t bits) {
    const SparseShare mine(team_, bytes_of_bits(bits));
    const auto byte_at = [&](uint32_t i) {
      const uint32_t byte = bytes[i];
      return bits - 8 * i < 8 ? byte & (0xff00u >> (bits - 8 * i)) & 0xffu : byte;
    };
    uint32_t ones = 0;
    for (uint32_t i = mine.first; i < mine.end; ++i)
      ones += static_cast<uint32_t>(__popc(byte_at(i)));
    uint32_t j = team_.before(ones, s_.counts);
    for (uint32_t i = mine.first; i < mine.end; ++i) {
      for (uint32_t byte = byte_at(i); byte != 0; ++j) {
        const auto first = static_cast<uint32_t>(__clz(static_cast<int>(byte))) - 24;
        if (j < b_.k) s_.indices[j] = static_cast<uint16_t>(8 * i + first);
        byte &= ~(0x80u >> first);
      }
    }
    return team_.combine(ones, Add()) == b_.k ? 1 : 0;
  }

  // Sums of the magnitudes for which in(a) holds, in the order of the contract: eight threads are
  // the lanes.
  template <class In>
  __device__ double sum(const float* c, double* lanes, In&& in) {
    if (team_.rank() < kSums) {
      double lane = 0;
      for (uint32_t j = team_.rank(); j < b_.k; j += kSums) {
        const float a = std::fabs(c[s_.indices[j]]);
        lane += in(a) ? a : 0.0f;
      }
      lanes[team_.rank()] = lane;
    }
    team_.sync();
    double folded[kSums];
    for (uint32_t i = 0; i < kSums; ++i) folded[i] = lanes[i];
    return fold_sum(folded);
  }
  __device__ uint32_t write_two_bits(float* c, uint8_t* codes, bool keep_all) {
    uint32_t no_zero = 1, n_high = 0, flags = 0;
    for (uint32_t j = team_.rank(); j < b_.k; j += team_.size())
      no_zero &= c[s_.indices[j]] != 0.0f ? 1 : 0;
    no_zero = team_.combine(no_zero, Both());
    const double all = sum(c, s_.lanes[0], [](float) { return true; });
    const SparseSplit split(all, b_.k, no_zero == 0);
    for (uint32_t j = team_.rank(); j < b_.k; j += team_.size())
      n_high += split.high(std::fabs(c[s_.indices[j]])) ? 1 : 0;
    n_high = team_.combine(n_high, Add());
    const double low = sum(c, s_.lanes[1], [&](float a) { return !split.high(a); });
    const double high = sum(c, s_.lanes[2], [&](float a) { return split.high(a); });
    const SparseLevels levels = SparseLevels::of_groups(low, high, b_.k, n_high, &flags);
    // A thread has whole bytes.
    for (uint32_t i = team_.rank(); i < b_.code_bytes; i += team_.size()) {
      uint32_t byte = 0;
      for (uint32_t j = 4 * i; j < 4 * i + 4; ++j) {
        byte <<= 2;
        if (j >= b_.k) continue;
        float& v = c[s_.indices[j]];
        const bool is_high = split.high(std::fabs(v));
        byte |= two_bit_code(v, is_high);
        if (!keep_all) v = v - two_bit_value(levels, v, is_high);
      }
      codes[i] = static_cast<uint8_t>(byte);
    }
    return finish(codes, levels, flags);
  }
  __device__ uint32_t write_integers(float* c, uint8_t* codes, bool keep_all) {
    uint32_t largest = 0, flags = 0;
    for (uint32_t j = team_.rank(); j < b_.k; j += team_.size()) {
      const uint32_t key = magnitude_bits(c[s_.indices[j]]);
      largest = key > largest ? key : largest;
    }
    largest = team_.combine(largest, Larger());
    team_.sync();
    const SparseLevels levels = SparseLevels::of_largest(b_.bits, largest, &flags);
    const uint32_t per_byte = b_.bits == 4 ? 2 : 1;
    for (uint32_t i = team_.rank(); i < b_.code_bytes; i += team_.size()) {
      float numbers[2] = {};
      for (uint32_t n = 0; n < per_byte; ++n) {
        const uint32_t j = i * per_byte + n;
        if (j >= b_.k) continue;
        float& v = c[s_.indices[j]];
        numbers[n] = quant_round(levels.scale, v);
        if (!keep_all) v = v - numbers[n] * levels.scale.scale;
      }
      codes[i] = packed_codes(integers_of(b_.bits), numbers);
    }
    return finish(codes, levels, flags);
  }
  __device__ uint32_t finish(uint8_t* codes, const SparseLevels& levels, uint32_t flags) {
    if (team_.rank() == 0) store_word(codes + b_.code_bytes, levels.stored);
    team_.sync();
    return team_.rank() == 0 ? flags : 0;
  }

  const Team team_{};
  const SparseBlock b_;
  Shared& s_;
};

// Calls visit(block, first element of the piece, byte of the payload) for the blocks of a run that
// are this team's.
template <class Team, class Visit>
__device__ inline void visit_blocks(const SparseArgs& args, const Piece& piece, const Run& run,
                                    Visit&& visit) {
  const SparsePlace place(args, piece);
  const uint32_t size = args.settings.block;
  const SparseBlock whole = sparse_block(args.settings, size);
  for (uint32_t at = Team().team() * size; at < run.count; at += Team::kTeams * size) {
    const uint32_t m = run.count - at < size ? run.count - at : size;
    visit(m == size ? whole : sparse_block(args.settings, m), run.first + at,
          place.of_block(args, piece.offset + run.first + at));
  }
}

// The only run of a thread block, and its piece.
struct SparseWork {
  __device__ explicit SparseWork(const Params& p)
      : run(p.runs[p.work[blockIdx.x].first_run]), piece(p.pieces[run.piece]) {}
  const Run run;
  const Piece piece;
};

template <class Team>
__global__ void __launch_bounds__(kThreads) sparse_encode(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::SparseEncode>();
  const auto& args = params.arguments<SparseArgs>();
  const SparseWork work(params);
  if (work.piece.tensor == kNoTensor) return;
  __shared__ SparseShared<Team::kBlock> shared[Team::kTeams];
  const float* x = tensor_of<const float>(o.x, work.piece);
  auto* payload = o.payload.template flat<uint8_t>();
  uint32_t flags = 0;
  if (is_sent_dense(work.piece)) {
    uint8_t* out = payload + SparsePlace(args, work.piece).of_dense(work.piece.offset);
    for (uint64_t i = work.run.first + threadIdx.x; i < work.run.first + work.run.count;
         i += kThreads) {
      const float guarded = guard_finite(x[i], &flags);
      std::memcpy(out + 4 * i, &guarded, sizeof guarded);
    }
    raise_on_device(o.flags.template flat<uint32_t>(), flags);
    return;
  }
  const auto* weight = o.weight.template flat<const float>();
  const bool keep_all = weight != nullptr && *weight == 0.0f;
  const auto rho = static_cast<float>(args.settings.error_decay);
  const Team team{};
  visit_blocks<Team>(args, work.piece, work.run,
                     [&](const SparseBlock& b, uint64_t first, uint64_t at) {
                       float* c = o.e.template flat<float>() + work.piece.flat + first;
                       for (uint32_t i = team.rank(); i < b.m; i += team.size())
                         c[i] = sparse_value(x[first + i], c[i], rho, &flags);
                       team.sync();
                       SparseSelection<Team> selection(b, &shared[team.team()]);
                       selection.select(c);
                       selection.write_indices(payload + at);
                       flags |= selection.write_values(c, payload + at + b.index_bytes, keep_all);
                     });
  raise_on_device(o.flags.template flat<uint32_t>(), flags);
}

template <class Team>
__global__ void __launch_bounds__(kThreads) sparse_undo(const __grid_constant__ Params params) {
  if (!params.holds() || !params.paired_ran) return;
  const auto& o = params.of<kernels::SparseEncodeUndo>();
  const auto& args = params.arguments<SparseArgs>();
  const SparseWork work(params);
  if (work.piece.tensor == kNoTensor || is_sent_dense(work.piece)) return;
  __shared__ SparseShared<Team::kBlock> shared[Team::kTeams];
  const float* x = tensor_of<const float>(o.x, work.piece);
  const auto* payload = o.payload.template flat<const uint8_t>();
  const auto* weight = o.weight.template flat<const float>();
  const bool counts = weight == nullptr || *weight != 0.0f;
  const auto rho = static_cast<float>(args.settings.error_decay);
  const Team team{};
  visit_blocks<Team>(args, work.piece, work.run,
                     [&](const SparseBlock& b, uint64_t first, uint64_t at) {
                       float* e = o.e.template flat<float>() + work.piece.flat + first;
                       SparseSelection<Team> selection(b, &shared[team.team()]);
                       if (counts && selection.read_indices(payload + at)) {
                         const SparseValues values(b, payload + at);
                         for (uint32_t j = team.rank(); j < b.k; j += team.size())
                           e[selection.index(j)] += values[j];
                       }
                       team.sync();
                       for (uint32_t i = team.rank(); i < b.m; i += team.size())
                         e[i] = sotto::sparse_undo(e[i], x[first + i], rho);
                     });
}

template <class Team>
__global__ void __launch_bounds__(kThreads) sparse_squares(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::SparseSquares>();
  const auto& args = params.arguments<SparseArgs>();
  const SparseWork work(params);
  if (work.piece.tensor == kNoTensor || is_sent_dense(work.piece)) return;
  __shared__ SparseShared<Team::kBlock> shared[Team::kTeams];
  const auto* rows = o.rows.template flat<const uint8_t>();
  const Team team{};
  visit_blocks<Team>(
      args, work.piece, work.run, [&](const SparseBlock& b, uint64_t first, uint64_t at) {
        double* squares = o.squares.template flat<double>() +
                          sparse_block_number(args.settings, work.piece, first) * args.world;
        SparseSelection<Team> selection(b, &shared[team.team()]);
        for (uint32_t r = 0; r < args.world; ++r) {
          const uint8_t* row = rows + r * args.row_bytes + at;
          const double sum =
              selection.read_indices(row) ? selection.squares(SparseValues(b, row)) : 0.0;
          if (team.rank() == 0) squares[r] = sum;
          team.sync();
        }
      });
}

__global__ void __launch_bounds__(kThreads) sparse_median(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::SparseMedian>();
  const auto& args = params.arguments<SparseMedianArgs>();
  const auto* squares = o.squares.flat<const double>();
  const auto* weights = o.weights.flat<const uint8_t>();
  auto* factors = o.factors.flat<float>();
  for (uint64_t i = threadIdx.x; i < args.n * args.world; i += kThreads) {
    const NormRange& range = params.ranges[i / args.world];
    const uint64_t r = i % args.world;
    factors[uint64_t{range.tensor} * args.world + r] =
        norm_of_squares(squares + range.first_block * args.world + r, range.blocks, args.world);
  }
  __syncthreads();
  for (uint64_t i = threadIdx.x; i < args.n; i += kThreads) {
    clip_to_median(factors + uint64_t{params.ranges[i].tensor} * args.world, args.world,
                   [&](uint32_t r) { return takes_part(weights, args.weight_bytes, r); });
  }
}

// Sums of a block over the ranks of a group, and how many ranks have sent an element.
template <uint32_t kBlock>
struct SparseSums {
  float partial[kBlock];
  uint16_t senders[kBlock];
};

template <class Team>
__global__ void __launch_bounds__(kThreads) sparse_mean(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::SparseMean>();
  const auto& args = params.arguments<SparseArgs>();
  const SparseWork work(params);
  if (work.piece.tensor == kNoTensor) return;
  __shared__ SparseShared<Team::kBlock> shared[Team::kTeams];
  __shared__ SparseSums<Team::kBlock> sums[Team::kTeams];
  const auto* rows = o.rows.template flat<const uint8_t>();
  const auto* weights = o.weights.template flat<const uint8_t>();
  const auto* factors = o.factors.template flat<const float>();
  if (factors != nullptr) factors += uint64_t{work.piece.tensor} * args.world;
  float* y = tensor_of<float>(o.y, work.piece);
  uint32_t ranks = 0;
  for (uint32_t r = 0; r < args.world; ++r)
    ranks += takes_part(weights, args.weight_bytes, r) ? 1 : 0;
  const float share = share_of(ranks);
  if (is_sent_dense(work.piece)) {
    const uint8_t* first = rows + SparsePlace(args, work.piece).of_dense(work.piece.offset);
    for (uint64_t i = work.run.first + threadIdx.x; i < work.run.first + work.run.count;
         i += kThreads) {
      y[i] = share * sum_of_ranks(args.world, [&](uint32_t r) {
               if (!takes_part(weights, args.weight_bytes, r)) return 0.0f;
               return SparseValues::dense_value(first + r * args.row_bytes, i);
             });
    }
    return;
  }
  const bool by_element = args.settings.average == SparseAverage::kContributors;
  const Team team{};
  auto& mine = sums[team.team()];
  visit_blocks<Team>(
      args, work.piece, work.run, [&](const SparseBlock& b, uint64_t first, uint64_t at) {
        SparseSelection<Team> selection(b, &shared[team.team()]);
        for (uint32_t i = team.rank(); i < b.m; i += team.size()) {
          mine.partial[i] = y[first + i] = 0.0f;
          mine.senders[i] = 0;
        }
        team.sync();
        for (uint32_t r = 0; r < args.world; ++r) {
          const uint8_t* row = rows + r * args.row_bytes + at;
          if (takes_part(weights, args.weight_bytes, r) && selection.read_indices(row)) {
            const SparseValues values(b, row);
            const float factor = factors == nullptr ? 1.0f : factors[r];
            for (uint32_t j = team.rank(); j < b.k; j += team.size()) {
              mine.partial[selection.index(j)] += factor * values[j];
              ++mine.senders[selection.index(j)];
            }
          }
          team.sync();
          if (r % 8 != 7 && r + 1 != args.world) continue;
          for (uint32_t i = team.rank(); i < b.m; i += team.size()) {
            y[first + i] += mine.partial[i];
            mine.partial[i] = 0.0f;
          }
          team.sync();
        }
        for (uint32_t i = team.rank(); i < b.m; i += team.size())
          y[first + i] *= by_element ? share_of(mine.senders[i]) : share;
        team.sync();
      });
}

}  // namespace sotto::cuda
