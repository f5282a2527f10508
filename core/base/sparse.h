// Codecs that send a selection of every block of a tensor: settings, and what a block is on the
// wire (specification sparse-loco, sections 3 to 5).
//
// A tensor's elements are cut into blocks from its first one; the last block may be shorter. Of a
// block its largest elements are sent, one block after the other without gaps: the index part, the
// codes, the levels. Bit strings have the most significant bit first and are padded to a byte with
// 0 bits; numbers are little-endian.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/base/host_device.h"

namespace sotto {

enum class SparseIndex : uint8_t { kEliasFano = 1, kPacked = 2 };
// What the sum of an element is divided by: the number of ranks, or of those that have sent it.
enum class SparseAverage : uint8_t { kRanks = 1, kContributors = 2 };
// Who adds up what ranks send of a block: each of them all blocks, or of every block its server,
// which sends a selection of the mean to all.
enum class SparseExchange : uint8_t { kGather = 1, kTwoPhase = 2 };

// Blocks are powers of two of elements. A kernel has a whole one in fast memory.
inline constexpr uint32_t kMinSparseBlock = 8;
inline constexpr uint32_t kMaxSparseBlock = 4096;

struct SparseSettings {
  uint32_t block = 4096;  // elements
  uint32_t k = 64;        // elements that are sent of a whole block, 1 to block
  uint32_t bits = 2;      // of a code: 2, 4, 8 or 32
  SparseIndex index = SparseIndex::kEliasFano;
  SparseAverage average = SparseAverage::kRanks;
  double error_decay = 1;  // error feedback is multiplied with it, as float32, in each call; 0 to 1
  uint64_t dense_below = 0;  // tensors with fewer elements are sent as float32
  // Of each tensor, ranks whose payload has a larger norm than the median rank's count as if they
  // had its norm.
  bool median_clip = false;
  SparseExchange exchange = SparseExchange::kGather;
  uint32_t k_server = 0;  // kTwoPhase: elements that a server sends of a whole block; 0: by ranks

  constexpr bool has_servers() const { return exchange == SparseExchange::kTwoPhase; }
};

// What the index part of a block is.
enum class SparseForm : uint8_t {
  kAll,        // nothing: all elements are selected
  kBitmap,     // a bit for each element
  kEliasFano,  // the low bits of all indices, then bit (index >> low) + j for index j
  kPacked,     // indices of `low` bits
};

// A block of m elements.
struct SparseBlock {
  uint32_t m = 0;
  uint32_t k = 0;  // selected elements
  uint32_t bits = 2;
  SparseForm form = SparseForm::kAll;
  uint32_t low = 0;          // bits, of kEliasFano and kPacked
  uint32_t low_bytes = 0;    // of the low bits, or of packed indices
  uint32_t index_bytes = 0;  // with the above
  uint32_t code_bytes = 0;

  SOTTO_HOST_DEVICE constexpr uint32_t level_bytes() const { return bits == 32 ? 0 : 4; }
  SOTTO_HOST_DEVICE constexpr uint32_t bytes() const {
    return index_bytes + code_bytes + level_bytes();
  }
};

SOTTO_HOST_DEVICE constexpr uint32_t bytes_of_bits(uint32_t bits) { return (bits + 7) / 8; }

// floor(log2(x)); x: not 0.
SOTTO_HOST_DEVICE constexpr uint32_t log2_floor(uint32_t x) {
  uint32_t result = 0;
  while (x >>= 1) ++result;
  return result;
}

// m: 1 to the settings' block. Halves of selected elements are rounded up.
SOTTO_HOST_DEVICE constexpr SparseBlock sparse_block(const SparseSettings& s, uint32_t m) {
  SparseBlock b;
  b.m = m;
  b.bits = s.bits;
  const uint32_t wanted = (2 * m * s.k + s.block) >> (log2_floor(s.block) + 1);
  b.k = wanted < 1 ? 1 : wanted > m ? m : wanted;
  b.code_bytes = bytes_of_bits(b.k * s.bits);
  if (b.k == m) return b;
  if (s.index == SparseIndex::kPacked) {
    b.form = SparseForm::kPacked;
    b.low = log2_floor(m - 1) + 1;
    b.low_bytes = b.index_bytes = bytes_of_bits(b.k * b.low);
    return b;
  }
  while (b.k << (b.low + 1) <= m) ++b.low;
  b.low_bytes = bytes_of_bits(b.k * b.low);
  b.index_bytes = b.low_bytes + bytes_of_bits(b.k + ((m - 1) >> b.low));
  b.form = SparseForm::kEliasFano;
  if (bytes_of_bits(m) > b.index_bytes) return b;
  b.form = SparseForm::kBitmap;
  b.low = b.low_bytes = 0;
  b.index_bytes = bytes_of_bits(m);
  return b;
}

// Of a server, which has error feedback that does not decay (section 6.2). By ranks: as many
// elements as these may have sent, or all where that is not shorter.
constexpr SparseSettings server_settings(const SparseSettings& s, uint64_t ranks) {
  SparseSettings out = s;
  out.k = s.k_server;
  if (out.k == 0) out.k = ranks * s.k < s.block ? static_cast<uint32_t>(ranks * s.k) : s.block;
  SparseSettings all = s;
  all.k = s.block;
  if (s.k_server == 0 && sparse_block(out, s.block).bytes() >= sparse_block(all, s.block).bytes())
    out.k = s.block;
  out.average = SparseAverage::kRanks;
  out.error_decay = 1;
  return out;
}

constexpr bool is_dense(const SparseSettings& s, uint64_t elements) {
  return elements < s.dense_below;
}

std::string_view sparse_index_name(SparseIndex index);           // "ef", "packed"
std::string_view sparse_average_name(SparseAverage average);     // "ranks", "contributors"
std::string_view sparse_exchange_name(SparseExchange exchange);  // "gather", "two_phase"

// visit(key, value) for every setting: a number, a bool, or a word as in JSON.
template <class Visit>
void for_each_setting(const SparseSettings& s, Visit&& visit) {
  visit("block", s.block);
  visit("k", s.k);
  visit("bits", s.bits);
  visit("index", sparse_index_name(s.index));
  visit("average", sparse_average_name(s.average));
  visit("error_decay", s.error_decay);
  visit("dense_below", s.dense_below);
  visit("median_clip", s.median_clip);
  visit("exchange", sparse_exchange_name(s.exchange));
  visit("k_server", s.k_server);
}

// Blocks of a tensor.
constexpr uint64_t sparse_blocks(const SparseSettings& s, uint64_t elements) {
  return (elements + s.block - 1) / s.block;
}
// Payload of elements from the start of a block on, to the tensor's end or a whole block's.
constexpr uint64_t coded_bytes(const SparseSettings& s, uint64_t elements) {
  const auto rest = static_cast<uint32_t>(elements % s.block);
  return elements / s.block * sparse_block(s, s.block).bytes() +
         (rest == 0 ? 0 : sparse_block(s, rest).bytes());
}
// Payload of a tensor.
constexpr uint64_t sparse_bytes(const SparseSettings& s, uint64_t elements) {
  return is_dense(s, elements) ? elements * 4 : coded_bytes(s, elements);
}

}  // namespace sotto
