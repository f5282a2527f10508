// How an all-reduce compresses: kinds of codecs, and the settings that make one.
#pragma once

#include <cstdint>
#include <numeric>
#include <string_view>

#include "core/base/host_device.h"

namespace sotto {

// What a compressed element is on the wire. The payload of a run of elements is a sequence of
// units: 8 signs (1 byte), a bfloat16 or binary16 (2 bytes), or a block of int8 or int4 codes and
// its float32 scale. All are little-endian; of two int4 codes the first is the high nibble.
enum class CodecKind : uint8_t { kOnebit = 1, kBf16 = 2, kFp16 = 3, kInt8 = 4, kInt4 = 5 };
std::string_view codec_name(CodecKind kind);  // "onebit", "bf16", ...

SOTTO_HOST_DEVICE constexpr bool codec_has_blocks(CodecKind kind) {
  return kind == CodecKind::kInt8 || kind == CodecKind::kInt4;
}

struct PayloadUnit {
  uint32_t elements = 8;
  uint32_t bytes = 1;
  SOTTO_HOST_DEVICE constexpr uint64_t bytes_of(uint64_t n) const { return n / elements * bytes; }
};

// block: elements per scale of int8 and int4, a power of two from kMinQuantBlock to kMaxQuantBlock.
inline constexpr uint32_t kMinQuantBlock = 32;
inline constexpr uint32_t kMaxQuantBlock = 512;
SOTTO_HOST_DEVICE constexpr PayloadUnit payload_unit(CodecKind kind, uint32_t block) {
  switch (kind) {
    case CodecKind::kOnebit: return {8, 1};
    case CodecKind::kBf16:
    case CodecKind::kFp16: return {1, 2};
    case CodecKind::kInt8: return {block, block + 4};
    case CodecKind::kInt4: return {block, block / 2 + 4};
  }
  return {};
}

// Of 1 bit (specification 1.2).
enum class ScaleKind : uint8_t { kL2 = 1, kL1 = 2 };
std::string_view scale_name(ScaleKind scale);  // "l2", "l1"

// What shares a scale: everything, a tensor, `bucket_elements` elements (the last bucket may have
// less), or the tensors of a parameter group. Buckets travel on their own: one is encoded while
// another is on its way.
enum class Granularity : uint8_t { kFlat = 1, kTensor = 2, kBucket = 3, kGroup = 4 };
std::string_view granularity_name(Granularity granularity);  // "flat", "tensor", "bucket", "group"

// chunk_align of the published arithmetic (mode compat): padded to a multiple of W * lcm(W, 8).
constexpr uint64_t compat_chunk_align(uint64_t ranks) { return std::lcm(ranks, uint64_t{8}); }

struct CodecSettings {
  CodecKind kind = CodecKind::kOnebit;
  ScaleKind scale = ScaleKind::kL2;
  Granularity granularity = Granularity::kFlat;
  uint64_t bucket_elements = 0;  // kBucket
  uint64_t chunk_align = 512;    // elements, a positive multiple of 8 and of `block`
  uint32_t block = 0;            // int8 and int4
  bool residual = true;          // false: no error feedback; 1 bit always has it
  // 1 bit, mode compat: padding is data, has error feedback and counts in the scales.
  bool compat = false;

  PayloadUnit unit() const { return payload_unit(kind, block); }
};

}  // namespace sotto
