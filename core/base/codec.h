// How an all-reduce compresses: kinds of codecs, and the settings that make one.
#pragma once

#include <array>
#include <cstdint>
#include <numeric>
#include <string_view>

#include "core/base/hierarchy.h"
#include "core/base/host_device.h"
#include "core/base/sparse.h"

namespace sotto {

// What a compressed element is on the wire. The payload of a run of elements is a sequence of
// units: 8 signs (1 byte), a bfloat16 or binary16 (2 bytes), or a block of integer codes and its
// float32 scale. All are little-endian; of the codes in a byte the first has the highest bits.
// Sparse codecs have no unit: core/base/sparse.h.
enum class CodecKind : uint8_t {
#define SOTTO_CODEC(type, number, ...) k##type = number,
#include "core/base/codecs.def"
};

struct PayloadUnit {
  uint32_t elements = 8;
  uint32_t bytes = 1;
  SOTTO_HOST_DEVICE constexpr uint64_t bytes_of(uint64_t n) const { return n / elements * bytes; }
};

SOTTO_HOST_DEVICE constexpr bool codec_has_blocks(CodecKind kind) {
#define SOTTO_CODEC(type, number, words, bits, block, ...) \
  if (kind == CodecKind::k##type) return block != 0;
#include "core/base/codecs.def"
  return false;
}

// Of the code of an element.
SOTTO_HOST_DEVICE constexpr uint32_t codec_bits(CodecKind kind) {
#define SOTTO_CODEC(type, number, words, bits, ...) \
  if (kind == CodecKind::k##type) return bits;
#include "core/base/codecs.def"
  return 8;
}

// block: elements per scale of codecs with blocks, a power of two from kMinQuantBlock to
// kMaxQuantBlock.
inline constexpr uint32_t kMinQuantBlock = 32;
inline constexpr uint32_t kMaxQuantBlock = 512;
SOTTO_HOST_DEVICE constexpr PayloadUnit payload_unit(CodecKind kind, uint32_t block) {
  const uint32_t bits = codec_bits(kind);
  if (codec_has_blocks(kind)) return {block, block / 8 * bits + 4};
  return bits < 8 ? PayloadUnit{8 / bits, 1} : PayloadUnit{1, bits / 8};
}

enum class ResidualUse : uint8_t { kAlways, kByDefault, kOnRequest };

// A row of the table, whose words are explained there.
struct CodecRow {
  CodecKind kind;
  std::string_view words;
  uint32_t block;
  bool scales;
  bool sparse;
  ResidualUse residual;

  constexpr std::string_view name() const { return words.substr(0, words.find('|')); }
};
inline constexpr CodecRow kCodecs[] = {
#define SOTTO_CODEC(type, number, words, bits, block, scales, sparse, residual, coding) \
  {CodecKind::k##type, words, block, scales, sparse, ResidualUse::residual},
#include "core/base/codecs.def"
};
const CodecRow& codec_row(CodecKind kind);
std::string_view codec_name(CodecKind kind);  // "onebit", "bf16", ...; "?": no codec

// Of codecs with scales (specification 1.2).
enum class ScaleKind : uint8_t { kL2 = 1, kL1 = 2 };
std::string_view scale_name(ScaleKind scale);  // "l2", "l1"

// What shares a scale: everything, a tensor, `bucket_elements` elements (the last bucket may have
// less), or the tensors of a parameter group. Buckets travel on their own: one is encoded while
// another is on its way.
enum class Granularity : uint8_t { kFlat = 1, kTensor = 2, kBucket = 3, kGroup = 4 };
std::string_view granularity_name(Granularity granularity);  // "flat", "tensor", "bucket", "group"

// chunk_align of the published arithmetic (mode compat): padded to a multiple of W * lcm(W, 8).
constexpr uint64_t compat_chunk_align(uint64_t ranks) { return std::lcm(ranks, uint64_t{8}); }

// chunk_align of sparse codecs, which have no chunks or such as begin with blocks: error feedback
// has little padding.
inline constexpr uint64_t kSparseAlign = 8;

struct CodecSettings {
  CodecKind kind = CodecKind::kOnebit;
  ScaleKind scale = ScaleKind::kL2;
  Granularity granularity = Granularity::kFlat;
  uint64_t bucket_elements = 0;  // kBucket
  uint64_t chunk_align = 512;    // elements, a positive multiple of 8 and of `block`
  uint32_t block = 0;            // of codecs with blocks
  bool residual = true;          // false: no error feedback
  // Codecs with scales, mode compat: padding is data, has error feedback and counts in the scales.
  bool compat = false;
  SparseSettings sparse;  // of sparse codecs
  // Not of sparse codecs, nor of mode compat.
  Hierarchy hierarchy = Hierarchy::kFlat;

  const CodecRow& row() const { return codec_row(kind); }
  PayloadUnit unit() const { return payload_unit(kind, block); }
  // Of an element in one encoding, padding apart; where servers send more than ranks, the mean of
  // both. ranks: 0: unknown, then that of one.
  double bits_per_element(uint64_t ranks) const {
    if (codec_row(kind).sparse) {
      const uint32_t own = sparse_block(sparse, sparse.block).bytes();
      if (!sparse.has_servers()) return 8.0 * own / sparse.block;
      return 4.0 *
             (own +
              sparse_block(server_settings(sparse, ranks == 0 ? 1 : ranks), sparse.block).bytes()) /
             sparse.block;
    }
    const PayloadUnit payload = payload_unit(kind, block);
    return 8.0 * payload.bytes / payload.elements;
  }
  // What decides about bytes and results, for hashes that ranks compare.
  std::array<uint64_t, 19> terms() const;
  // Servers add up and encode again, with error feedback of their own.
  bool server_residual() const { return residual && has_servers(); }
  bool has_servers() const { return !row().sparse || sparse.has_servers(); }
  // Elements of a tensor; chunks begin at multiples of it, so that no block has two servers.
  uint64_t tensor_align() const { return row().sparse && has_servers() ? sparse.block : 1; }
};

}  // namespace sotto
