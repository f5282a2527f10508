// Selections of blocks: the arithmetic of one value, one index and the levels of a block, for every
// device.
#pragma once

#include "core/kernels/quant_elements.h"
#include "core/kernels/sparse.h"

namespace sotto {

// Where a piece's payload lies, of payloads that begin at SparseArgs::base.
struct SparsePlace {
  uint64_t base = 0;         // of the tensor's first element
  uint32_t block_bytes = 0;  // of a whole block

  SOTTO_HOST_DEVICE SparsePlace(const SparseArgs& args, const Piece& piece)
      : base(piece.target - piece.offset - args.base),
        block_bytes(sparse_block(args.settings, args.settings.block).bytes()) {}
  // offset: in the tensor, a multiple of the block.
  SOTTO_HOST_DEVICE uint64_t of_block(const SparseArgs& args, uint64_t offset) const {
    return base + (offset >> log2_floor(args.settings.block)) * block_bytes;
  }
  SOTTO_HOST_DEVICE uint64_t of_dense(uint64_t offset) const { return base + 4 * offset; }
};

SOTTO_HOST_DEVICE inline bool is_sent_dense(const Piece& piece) { return piece.scale == 1; }

// fl(fl(rho * e) + x').
SOTTO_HOST_DEVICE inline float sparse_value(float x, float e, float rho, uint32_t* flags) {
  const float c = rho * e + guard_finite(x, flags);
  if (!is_finite(c)) *flags |= kFlagNonfinite;
  return c;
}
SOTTO_HOST_DEVICE inline float sparse_undo(float c, float x, float rho) {
  uint32_t unused = 0;
  return is_finite(c) && rho != 0.0f ? (c - guard_finite(x, &unused)) / rho : 0.0f;
}

// Folds the 8 lanes of a sum by 4, 2, 1.
SOTTO_HOST_DEVICE inline double fold_sum(double* lanes) {
  for (uint32_t half = 4; half != 0; half /= 2) {
    for (uint32_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

SOTTO_HOST_DEVICE constexpr CodecKind integers_of(uint32_t bits) {
  return bits == 4 ? CodecKind::kInt4 : CodecKind::kInt8;
}

// Magnitudes of 2 bits: those above the threshold are high.
struct SparseSplit {
  float threshold = 0;

  SOTTO_HOST_DEVICE SparseSplit(double sum, uint32_t k, bool has_zero)
      : threshold(has_zero ? 0.0f : static_cast<float>(sum / k)) {}
  SOTTO_HOST_DEVICE bool high(float magnitude) const { return magnitude > threshold; }
};

// What the values of a block are made of.
struct SparseLevels {
  float lo = 0, hi = 0;  // 2 bits
  QuantScale scale;      // 4, 8 bits
  uint32_t stored = 0;   // 2 to 8 bits: as the payload has them

  SOTTO_HOST_DEVICE static SparseLevels of_groups(double low_sum, double high_sum, uint32_t k,
                                                  uint32_t n_high, uint32_t* flags) {
    const uint16_t lo = f32_to_bf16(static_cast<float>(low_sum / (k - n_high)));
    const uint16_t hi = n_high == 0 ? lo : f32_to_bf16(static_cast<float>(high_sum / n_high));
    SparseLevels levels;
    levels.lo = bf16_to_f32(lo);
    levels.hi = bf16_to_f32(hi);
    levels.stored = uint32_t{hi} << 16 | lo;
    if (is_finite(levels.lo) && is_finite(levels.hi)) return levels;
    *flags |= kFlagNonfinite;
    return {};
  }
  // max_bits: the largest magnitude, as its bits.
  SOTTO_HOST_DEVICE static SparseLevels of_largest(uint32_t bits, uint32_t max_bits,
                                                   uint32_t* flags) {
    SparseLevels levels;
    levels.scale = quant_scale(integers_of(bits), max_bits, flags);
    levels.stored = std::bit_cast<uint32_t>(levels.scale.scale);
    return levels;
  }
};

// The value that stands for v, and its code, of 2 bits.
SOTTO_HOST_DEVICE inline float two_bit_value(const SparseLevels& levels, float v, bool high) {
  return plus_minus(v >= 0.0f, high ? levels.hi : levels.lo);
}
SOTTO_HOST_DEVICE inline uint32_t two_bit_code(float v, bool high) {
  return (v >= 0.0f ? 2u : 0u) + (high ? 1u : 0u);
}

SOTTO_HOST_DEVICE inline void store_word(uint8_t* at, uint32_t word) {
  std::memcpy(at, &word, sizeof word);
}

// The values of a block's payload, whatever its bytes are.
class SparseValues {
 public:
  SOTTO_HOST_DEVICE SparseValues(const SparseBlock& block, const uint8_t* payload)
      : codes_(payload + block.index_bytes), bits_(block.bits) {
    if (bits_ == 32) return;
    uint32_t stored;
    std::memcpy(&stored, codes_ + block.code_bytes, sizeof stored);
    if (bits_ == 2) {
      lo_ = finite_or_zero(bf16_to_f32(static_cast<uint16_t>(stored)));
      hi_ = finite_or_zero(bf16_to_f32(static_cast<uint16_t>(stored >> 16)));
    } else {
      lo_ = finite_or_zero(std::bit_cast<float>(stored));
    }
  }
  // Of the j-th selected element.
  SOTTO_HOST_DEVICE float operator[](uint32_t j) const {
    if (bits_ == 2) return two_bits(codes_[j / 4] >> (6 - 2 * (j % 4)) & 3);
    if (bits_ != 32) return quant_number(integers_of(bits_), codes_, j) * lo_;
    return dense_value(codes_, j);
  }
  // Of a code of 2 bits.
  SOTTO_HOST_DEVICE float two_bits(uint32_t code) const {
    return plus_minus(code >= 2, (code & 1) != 0 ? hi_ : lo_);
  }
  // Element i of those that are sent as float32.
  SOTTO_HOST_DEVICE static float dense_value(const uint8_t* payload, uint64_t i) {
    float x;
    std::memcpy(&x, payload + 4 * i, sizeof x);
    return finite_or_zero(x);
  }

 private:
  SOTTO_HOST_DEVICE static float finite_or_zero(float x) { return is_finite(x) ? x : 0.0f; }

  const uint8_t* codes_;
  uint32_t bits_;
  float lo_ = 0, hi_ = 0;  // or the scale
};

// Number j of a string of numbers of `low` bits, at most 12. Two bytes behind it are read.
SOTTO_HOST_DEVICE inline uint32_t number_at(const uint8_t* bytes, uint32_t low, uint32_t j) {
  if (low == 0) return 0;
  const uint32_t bit = j * low;
  const uint8_t* at = bytes + bit / 8;
  const uint32_t window = static_cast<uint32_t>(at[0]) << 16 | static_cast<uint32_t>(at[1]) << 8 |
                          static_cast<uint32_t>(at[2]);
  return window >> (24 - bit % 8 - low) & ((1u << low) - 1);
}

// 1 over the number of ranks that an average is of.
SOTTO_HOST_DEVICE inline float share_of(uint32_t ranks) {
  return ranks == 0 ? 0.0f : 1.0f / static_cast<float>(ranks);
}

// Number of the block with element `first` of a piece, among those of all tensors.
SOTTO_HOST_DEVICE inline uint64_t sparse_block_number(const SparseSettings& settings,
                                                      const Piece& piece, uint64_t first) {
  return piece.message + ((piece.offset + first) >> log2_floor(settings.block));
}
// fl(sqrt(sum of n squares, `stride` from each other)).
SOTTO_HOST_DEVICE inline float norm_of_squares(const double* squares, uint64_t n, uint32_t stride) {
  double sum = 0;
  for (uint64_t i = 0; i < n; ++i) sum += squares[i * stride];
  return static_cast<float>(std::sqrt(sum));
}
// What the values of a rank with this norm are multiplied with.
SOTTO_HOST_DEVICE inline float median_factor(float median, float norm) {
  return norm > median ? static_cast<float>(double{median} / (double{norm} + 1e-8)) : 1.0f;
}
// Element floor((n - 1) / 2) of the ascending norms of the n ranks for which counts(r); 0: there
// are none.
template <class Counts>
SOTTO_HOST_DEVICE inline float lower_median(const float* norms, uint32_t world, Counts&& counts) {
  uint32_t n = 0;
  for (uint32_t r = 0; r < world; ++r) n += counts(r) ? 1 : 0;
  for (uint32_t r = 0; r < world; ++r) {
    if (!counts(r)) continue;
    uint32_t below = 0, equal = 0;
    for (uint32_t other = 0; other < world; ++other) {
      if (!counts(other)) continue;
      below += norms[other] < norms[r] ? 1 : 0;
      equal += norms[other] == norms[r] ? 1 : 0;
    }
    if (below <= (n - 1) / 2 && (n - 1) / 2 < below + equal) return norms[r];
  }
  return 0;
}
// norms: of all ranks, which become factors.
template <class Counts>
SOTTO_HOST_DEVICE inline void clip_to_median(float* norms, uint32_t world, Counts&& counts) {
  const float median = lower_median(norms, world, counts);
  for (uint32_t r = 0; r < world; ++r)
    norms[r] = counts(r) ? median_factor(median, norms[r]) : 1.0f;
}

// Whether a rank takes part. weights may be null.
SOTTO_HOST_DEVICE inline bool takes_part(const uint8_t* weights, uint32_t weight_bytes,
                                         uint32_t rank) {
  if (weights == nullptr) return true;
  float weight;
  std::memcpy(&weight, weights + uint64_t{rank} * weight_bytes, sizeof weight);
  return weight != 0.0f;
}

}  // namespace sotto
