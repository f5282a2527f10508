// Selections of blocks: what is common to the reference and to vector kernels.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "core/cpu/elements.h"
#include "core/kernels/sparse_elements.h"

namespace sotto {

// Where the ones of a byte are, the first bit highest; behind them zeros.
struct OnesOfBytes {
  uint16_t at[256][8] = {};
  uint8_t count[256] = {};

  constexpr OnesOfBytes() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (uint32_t bit = 0; bit < 8; ++bit) {
        if ((byte & 0x80u >> bit) != 0) at[byte][count[byte]++] = static_cast<uint16_t>(bit);
      }
    }
  }
};
inline constexpr OnesOfBytes kOnesOfBytes;

// A block that is encoded. Vectors behind the last element may be written.
struct SparseChoice {
  static constexpr uint32_t kRoom = kMaxSparseBlock + 16;
  uint16_t indices[kRoom];
  float values[kRoom];   // v
  float decoded[kRoom];  // q
};

// Parts that vector kernels do in another way.
struct ScalarSparse {
  // e becomes c, of which k elements are chosen.
  static void choose(const SparseBlock& b, const float* x, float* e, float rho, SparseChoice* s,
                     uint32_t* flags) {
    form(x, e, rho, b.m, flags);
    select(e, b.m, b.k, s->indices);
    for (uint32_t j = 0; j < b.k; ++j) s->values[j] = e[s->indices[j]];
  }
  // e becomes c, n elements.
  static void form(const float* x, float* e, float rho, uint32_t n, uint32_t* flags) {
    for (uint32_t i = 0; i < n; ++i) e[i] = sparse_value(x[i], e[i], rho, flags);
  }
  // y = sums * factor; sums become 0. at: y's first element in its array. Returns whether stores
  // are to be waited for.
  static bool finish(float* sums, float factor, uint32_t n, uint64_t at, float* y) {
    (void)at;
    for (uint32_t i = 0; i < n; ++i) y[i] = sums[i] * factor;
    std::fill_n(sums, n, 0.0f);
    return false;
  }
  static void finish_streams() {}
  // The indices of kEliasFano, as read_indices.
  static bool elias_fano(const SparseBlock& b, const uint8_t* payload, uint16_t* indices) {
    const uint32_t bits = b.k + ((b.m - 1) >> b.low);
    if (positions_of_ones(payload + b.low_bytes, bits, b.k, indices) != b.k) return false;
    for (uint32_t j = 0; j < b.k; ++j) {
      indices[j] = static_cast<uint16_t>((indices[j] - j) << b.low | number_at(payload, b.low, j));
    }
    return are_ascending(indices, b.k) && indices[b.k - 1] < b.m;
  }
  // q of k codes of 2 bits. q: of each code.
  static void two_bit_values(const float* of_code, const uint8_t* codes, uint32_t k, float* q) {
    for (uint32_t j = 0; j < k; ++j) q[j] = of_code[codes[j / 4] >> (6 - 2 * (j % 4)) & 3];
  }
  static void write_two_bits(const SparseBlock& b, SparseChoice* s, uint8_t* codes,
                             uint32_t* flags);
  // Indices of the k largest of m magnitudes, ascending, k < m.
  static void select(const float* c, uint32_t m, uint32_t k, uint16_t* indices) {
    uint32_t keys[kMaxSparseBlock] = {};
    for (uint32_t i = 0; i < m; ++i) keys[i] = magnitude_bits(c[i]);
    std::nth_element(keys, keys + (k - 1), keys + m, std::greater<>());
    collect(c, m, k, keys[k - 1], indices);
  }
  // last: the smallest key that is selected.
  static void collect(const float* c, uint32_t m, uint32_t k, uint32_t last, uint16_t* indices) {
    uint32_t above = 0;
    for (uint32_t i = 0; i < m; ++i) above += magnitude_bits(c[i]) > last;
    uint32_t equal = k - above;
    for (uint32_t i = 0, j = 0; j < k; ++i) {
      const uint32_t key = magnitude_bits(c[i]);
      if (key < last || (key == last && equal == 0)) continue;
      equal -= key == last;
      indices[j++] = static_cast<uint16_t>(i);
    }
  }
  // The positions of the ones of a string of `bits` bits, as far as there are `most` of them.
  // Returns how many it has.
  static uint32_t positions_of_ones(const uint8_t* bytes, uint32_t bits, uint32_t most,
                                    uint16_t* positions) {
    return positions_from(0, 0, bytes, bits, most, positions);
  }
  // Of byte i on, behind those that `ones` are of.
  static uint32_t positions_from(uint32_t i, uint32_t ones, const uint8_t* bytes, uint32_t bits,
                                 uint32_t most, uint16_t* positions) {
    for (; 8 * i < bits; ++i) {
      const uint32_t inside = std::min(8u, bits - 8 * i);
      const uint32_t byte = bytes[i] & 0xff00u >> inside, count = kOnesOfBytes.count[byte];
      for (uint32_t l = 0; l < count && ones + l < most; ++l)
        positions[ones + l] = static_cast<uint16_t>(kOnesOfBytes.at[byte][l] + 8 * i);
      ones += count;
    }
    return ones;
  }
  static bool are_ascending(const uint16_t* indices, uint32_t k) {
    for (uint32_t j = 1; j < k; ++j) {
      if (indices[j] <= indices[j - 1]) return false;
    }
    return true;
  }
};

// Writes numbers of a few bits one after the other; the last byte is filled with zeros.
class BitWriter {
 public:
  explicit BitWriter(uint8_t* out) : out_(out) {}
  void put(uint32_t value, uint32_t bits) {
    word_ = word_ << bits | value;
    for (held_ += bits; held_ >= 8; held_ -= 8)
      *out_++ = static_cast<uint8_t>(word_ >> (held_ - 8));
  }
  void finish() {
    if (held_ != 0) put(0, 8 - held_);
  }

 private:
  uint8_t* out_;
  uint64_t word_ = 0;
  uint32_t held_ = 0;
};

// Writes a string of n bytes, at most 512, whose ones are at the k ascending positions.
template <class Position>
void write_ones(uint32_t k, uint32_t n, Position&& position, uint8_t* out) {
  uint64_t words[kMaxSparseBlock / 64 + 1];
  std::fill_n(words, n / 8 + 1, uint64_t{0});
  uint64_t word = 0;
  for (uint32_t j = 0, last = 0; j < k; ++j) {  // words stay in a register until they are complete
    const uint32_t p = position(j), at = p / 64;
    word = (at == last ? word : 0) | uint64_t{1} << 63 >> p % 64;
    words[at] = word;
    last = at;
  }
  for (uint32_t w = 0; 8 * w < n; ++w) words[w] = __builtin_bswap64(words[w]);
  std::memcpy(out, words, n);
}

// Writes the kLow low bits of k numbers as a string of n bytes.
template <uint32_t kLow>
void pack(const uint16_t* numbers, uint32_t k, uint32_t n, uint8_t* bytes) {
  constexpr uint32_t kMask = (1u << kLow) - 1;
  uint32_t j = 0;
  if constexpr (kLow != 0 && kLow <= 8) {
    for (; j + 8 <= k && j * kLow / 8 + 8 <= n; j += 8) {  // eight are in a word
      uint64_t word = 0;
      for (uint32_t l = 0; l < 8; ++l) word = word << kLow | (numbers[j + l] & kMask);
      word = __builtin_bswap64(word << (64 - 8 * kLow) % 64);
      std::memcpy(bytes + j * kLow / 8, &word, sizeof word);
    }
  }
  BitWriter rest(bytes + j * kLow / 8);
  for (; j < k; ++j) rest.put(numbers[j] & kMask, kLow);
  rest.finish();
}

// The k numbers of a string of n bytes, of kLow bits each, at most 12.
template <uint32_t kLow>
void unpack(const uint8_t* bytes, uint32_t n, uint32_t k, uint16_t* numbers) {
  uint32_t j = 0;
  if constexpr (kLow != 0) {
    const auto put = [&](uint64_t word, uint32_t l) {
      numbers[j + l] = static_cast<uint16_t>(word >> (64 - kLow * (l + 1)) & ((1u << kLow) - 1));
    };
    for (; j + 4 <= k && j * kLow / 8 + 8 <= n; j += 4) {  // four are in a word
      uint64_t word;
      std::memcpy(&word, bytes + j * kLow / 8, sizeof word);
      word = __builtin_bswap64(word) << j * kLow % 8;
      put(word, 0), put(word, 1), put(word, 2), put(word, 3);
    }
  }
  for (; j < k; ++j) numbers[j] = static_cast<uint16_t>(number_at(bytes, kLow, j));
}

// The two of numbers of so many bits.
struct BitNumbers {
  void (*pack)(const uint16_t*, uint32_t k, uint32_t n, uint8_t* bytes);
  void (*unpack)(const uint8_t* bytes, uint32_t n, uint32_t k, uint16_t*);
};
inline constexpr auto kOfBits = []<uint32_t... kLow>(std::integer_sequence<uint32_t, kLow...>) {
  return std::array{BitNumbers{pack<kLow>, unpack<kLow>}...};
}
(std::make_integer_sequence<uint32_t, 13>());

inline void write_indices(const SparseBlock& b, const uint16_t* indices, uint8_t* out) {
  if (b.form == SparseForm::kAll) return;
  if (b.form == SparseForm::kBitmap)
    return write_ones(
        b.k, b.index_bytes, [&](uint32_t j) { return indices[j]; }, out);
  kOfBits[b.low].pack(indices, b.k, b.low_bytes, out);
  if (b.form == SparseForm::kPacked) return;
  write_ones(
      b.k, b.index_bytes - b.low_bytes, [&](uint32_t j) { return (indices[j] >> b.low) + j; },
      out + b.low_bytes);
}

// Whether these are k ascending indices below m.
template <class Ops>
bool read_indices(const SparseBlock& b, const uint8_t* payload, uint16_t* indices) {
  switch (b.form) {
    case SparseForm::kAll:
      for (uint32_t j = 0; j < b.k; ++j) indices[j] = static_cast<uint16_t>(j);
      return true;
    case SparseForm::kBitmap: return Ops::positions_of_ones(payload, b.m, b.k, indices) == b.k;
    case SparseForm::kPacked: kOfBits[b.low].unpack(payload, b.low_bytes, b.k, indices); break;
    case SparseForm::kEliasFano: return Ops::elias_fano(b, payload, indices);
  }
  return Ops::are_ascending(indices, b.k) && indices[b.k - 1] < b.m;
}

// Nothing is known of signs and groups of values, so there are no branches on them.
inline float magnitude_if(bool counts, float a) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(a) & (0u - static_cast<uint32_t>(counts)));
}

// Lanes of sums, eight magnitudes at a time: which(a) says whether one counts.
template <class Which>
double sum_of_magnitudes(const float* v, uint32_t k, Which&& which) {
  double lanes[8] = {};
  uint32_t j = 0;
  for (; j + 8 <= k; j += 8) {
    for (uint32_t l = 0; l < 8; ++l) {
      const float a = std::fabs(v[j + l]);
      lanes[l] += magnitude_if(which(a), a);
    }
  }
  for (uint32_t l = 0; j + l < k; ++l) {
    const float a = std::fabs(v[j + l]);
    lanes[l] += magnitude_if(which(a), a);
  }
  return fold_sum(lanes);
}

// S(q_j^2) of a payload.
inline double sum_of_squares(const SparseBlock& b, const SparseValues& values) {
  double lanes[8] = {};
  for (uint32_t j = 0; j < b.k; ++j) {
    const double q = values[j];
    lanes[j % 8] += q * q;
  }
  return fold_sum(lanes);
}

// Codes and levels of v; q.
inline void ScalarSparse::write_two_bits(const SparseBlock& b, SparseChoice* s, uint8_t* codes,
                                         uint32_t* flags) {
  bool zero = false;
  for (uint32_t j = 0; j < b.k; ++j) zero |= s->values[j] == 0.0f;
  const SparseSplit split(sum_of_magnitudes(s->values, b.k, [](float) { return true; }), b.k, zero);
  uint32_t n_high = 0;
  for (uint32_t j = 0; j < b.k; ++j) n_high += split.high(std::fabs(s->values[j]));
  const double low = sum_of_magnitudes(s->values, b.k, [&](float a) { return !split.high(a); });
  const double high = sum_of_magnitudes(s->values, b.k, [&](float a) { return split.high(a); });
  const SparseLevels levels = SparseLevels::of_groups(low, high, b.k, n_high, flags);
  const uint32_t magnitudes[2] = {std::bit_cast<uint32_t>(levels.lo),
                                  std::bit_cast<uint32_t>(levels.hi)};
  for (uint32_t first = 0; first < b.k; first += 4) {
    uint32_t byte = 0;
    for (uint32_t j = first; j < std::min(first + 4, b.k); ++j) {
      const float v = s->values[j];
      const uint32_t high_bit = split.high(std::fabs(v)) ? 1 : 0, negative = v >= 0.0f ? 0 : 1;
      s->decoded[j] = std::bit_cast<float>(magnitudes[high_bit] ^ negative << 31);
      byte |= (2 - 2 * negative + high_bit) << (6 - 2 * (j - first));
    }
    codes[first / 4] = static_cast<uint8_t>(byte);
  }
  store_word(codes + b.code_bytes, levels.stored);
}

inline void write_integers(const SparseBlock& b, SparseChoice* s, uint8_t* codes, uint32_t* flags) {
  uint32_t largest = 0;
  for (uint32_t j = 0; j < b.k; ++j) largest = std::max(largest, magnitude_bits(s->values[j]));
  const SparseLevels levels = SparseLevels::of_largest(b.bits, largest, flags);
  BitWriter out(codes);
  for (uint32_t j = 0; j < b.k; ++j) {
    const float number = quant_round(levels.scale, s->values[j]);
    s->decoded[j] = number * levels.scale.scale;
    out.put(static_cast<uint32_t>(static_cast<int32_t>(number)) & ((1u << b.bits) - 1), b.bits);
  }
  out.finish();
  store_word(codes + b.code_bytes, levels.stored);
}

template <class Ops>
void write_values(const SparseBlock& b, SparseChoice* s, uint8_t* codes, uint32_t* flags) {
  if (b.bits == 2) return Ops::write_two_bits(b, s, codes, flags);
  if (b.bits != 32) return write_integers(b, s, codes, flags);
  std::memcpy(codes, s->values, b.code_bytes);
  std::memcpy(s->decoded, s->values, b.code_bytes);
}

// Calls visit(block, first element of the piece, byte of the payload) for the blocks of a piece.
template <class Visit>
void for_each_sparse_block(const SparseArgs& args, const Piece& p, Visit&& visit) {
  const SparsePlace place(args, p);
  const uint32_t size = args.settings.block;
  const SparseBlock whole = sparse_block(args.settings, size);
  for (uint64_t first = 0; first < p.count; first += size) {
    const auto m = static_cast<uint32_t>(std::min<uint64_t>(size, p.count - first));
    visit(m == size ? whole : sparse_block(args.settings, m), first,
          place.of_block(args, p.offset + first));
  }
}

// x of elements that are sent as float32.
inline void write_dense(const float* x, uint64_t n, uint8_t* out, uint32_t* flags) {
  for (uint64_t i = 0; i < n; ++i) {
    const float guarded = guard_finite(x[i], flags);
    std::memcpy(out + 4 * i, &guarded, sizeof guarded);
  }
}

template <class Ops>
void run_sparse_encode(const KernelCall& call) {
  const auto& o = call.of<kernels::SparseEncode>();
  const auto& a = call.arguments<SparseArgs>();
  auto* payload = o.payload.flat<uint8_t>();
  const auto* weight = o.weight.flat<const float>();
  const bool counts = weight == nullptr || *weight != 0.0f;
  const auto rho = static_cast<float>(a.settings.error_decay);
  uint32_t flags = 0;
  Ops ops;
  SparseChoice s;
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const float* x = o.x.list<const float>(p.tensor) + p.offset;
    if (is_sent_dense(p)) {
      write_dense(x, p.count, payload + SparsePlace(a, p).of_dense(p.offset), &flags);
      continue;
    }
    for_each_sparse_block(a, p, [&](const SparseBlock& b, uint64_t first, uint64_t at) {
      float* c = o.e.flat<float>() + p.flat + first;
      if (b.form == SparseForm::kAll) {
        Ops::form(x + first, c, rho, b.m, &flags);
        for (uint32_t j = 0; j < b.k; ++j) s.indices[j] = static_cast<uint16_t>(j);
        std::memcpy(s.values, c, b.k * sizeof *c);
      } else {
        ops.choose(b, x + first, c, rho, &s, &flags);
      }
      write_indices(b, s.indices, payload + at);
      write_values<Ops>(b, &s, payload + at + b.index_bytes, &flags);
      if (!counts) return;
      for (uint32_t j = 0; j < b.k; ++j) c[s.indices[j]] = s.values[j] - s.decoded[j];
    });
  }
  raise_flags(o.flags.flat<uint32_t>(), flags);
}

// The mean of all ranks.
template <class Ops>
class SparseSum {
 public:
  SparseSum(const KernelCall& call, const kernels::SparseMeanOperands<Operand>& o)
      : args_(call.arguments<SparseArgs>()),
        rows_(o.rows.flat<const uint8_t>()),
        weights_(o.weights.flat<const uint8_t>()),
        factors_(o.factors.flat<const float>()) {
    for (uint32_t r = 0; r < args_.world; ++r)
      ranks_ += takes_part(weights_, args_.weight_bytes, r);
  }

  // first: y's first element in its array.
  void block(const SparseBlock& b, uint32_t tensor, uint64_t at, uint64_t first, float* y) {
    const float* const factors =
        factors_ == nullptr ? nullptr : factors_ + uint64_t{tensor} * args_.world;
    const bool by_element = args_.settings.average == SparseAverage::kContributors;
    if (by_element) std::fill_n(senders_, b.m, 0u);
    add_group(b, 0, factors, at, sums_);
    for (uint32_t group = 8; group < args_.world; group += 8) {
      add_group(b, group, factors, at, partial_);
      for (uint32_t i = 0; i < b.m; ++i) sums_[i] += partial_[i];
      std::fill_n(partial_, b.m, 0.0f);
    }
    if (by_element) {
      for (uint32_t i = 0; i < b.m; ++i) sums_[i] *= share_of(senders_[i]);
    }
    streamed_ |= Ops::finish(sums_, by_element ? 1.0f : share_of(ranks_), b.m, first, y);
  }
  void finish() const {
    if (streamed_) Ops::finish_streams();
  }
  void dense(uint64_t at, uint64_t n, float* y) {
    const float share = share_of(ranks_);
    for (uint64_t i = 0; i < n; ++i) {
      y[i] = share * sum_of_ranks(args_.world, [&](uint32_t r) {
               if (!takes_part(weights_, args_.weight_bytes, r)) return 0.0f;
               return SparseValues::dense_value(rows_ + r * args_.row_bytes + at, i);
             });
    }
  }
  const SparseArgs& args() const { return args_; }

 private:
  // Ranks from `group` on.
  void add_group(const SparseBlock& b, uint32_t group, const float* factors, uint64_t at,
                 float* sums) {
    for (uint32_t r = group; r < std::min(args_.world, group + 8); ++r) {
      const uint8_t* row = rows_ + r * args_.row_bytes + at;
      // Blocks are short and of many rows, so that processors do not foresee the next one.
      for (uint32_t i = 0; i < b.bytes(); i += 64) __builtin_prefetch(row + b.bytes() + i);
      if (!takes_part(weights_, args_.weight_bytes, r) || !read_indices<Ops>(b, row, indices_))
        continue;
      const SparseValues values(b, row);
      const float factor = factors == nullptr ? 1.0f : factors[r];
      if (b.bits == 2) {
        add_two_bits(b, values, factor, row, sums);
      } else {
        for (uint32_t j = 0; j < b.k; ++j) sums[indices_[j]] += factor * values[j];
      }
      if (args_.settings.average == SparseAverage::kRanks) continue;
      for (uint32_t j = 0; j < b.k; ++j) ++senders_[indices_[j]];
    }
  }

  void add_two_bits(const SparseBlock& b, const SparseValues& values, float factor,
                    const uint8_t* row, float* sums) {
    const float of_code[4] = {factor * values.two_bits(0), factor * values.two_bits(1),
                              factor * values.two_bits(2), factor * values.two_bits(3)};
    Ops::two_bit_values(of_code, row + b.index_bytes, b.k, values_);
    for (uint32_t j = 0; j < b.k; ++j) sums[indices_[j]] += values_[j];
  }

  const SparseArgs& args_;
  const uint8_t* rows_;
  const uint8_t* weights_;
  const float* factors_;
  uint32_t ranks_ = 0;
  bool streamed_ = false;
  uint16_t indices_[kMaxSparseBlock];
  float values_[kMaxSparseBlock];
  uint32_t senders_[kMaxSparseBlock];
  // Sums, and those of a group of ranks behind the first; 0 between blocks.
  alignas(64) float sums_[kMaxSparseBlock] = {};
  alignas(64) float partial_[kMaxSparseBlock] = {};
};

template <class Ops>
void run_sparse_mean(const KernelCall& call) {
  const auto& o = call.of<kernels::SparseMean>();
  SparseSum<Ops> sum(call, o);
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    float* y = o.y.list<float>(p.tensor) + p.offset;
    if (is_sent_dense(p)) {
      sum.dense(SparsePlace(sum.args(), p).of_dense(p.offset), p.count, y);
      continue;
    }
    for_each_sparse_block(sum.args(), p, [&](const SparseBlock& b, uint64_t first, uint64_t at) {
      sum.block(b, p.tensor, at, p.offset + first, y + first);
    });
  }
  sum.finish();
}

}  // namespace sotto
