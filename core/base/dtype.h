// Element types: DLPack's code | bits << 8 | lanes << 16, as in the C header (sotto_dtype).
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/base/host_device.h"

namespace sotto {

enum class Dtype : uint32_t {
  kI8 = 0x00010800,
  kI16 = 0x00011000,
  kI32 = 0x00012000,
  kI64 = 0x00014000,
  kU8 = 0x00010801,
  kU16 = 0x00011001,
  kU32 = 0x00012001,
  kU64 = 0x00014001,
  kF16 = 0x00011002,
  kF32 = 0x00012002,
  kF64 = 0x00014002,
  kBF16 = 0x00011004,
};

// True for the types above; every other number is refused at the C ABI.
bool dtype_known(uint32_t code);
std::string_view dtype_name(Dtype dtype);
SOTTO_HOST_DEVICE constexpr uint64_t dtype_bytes(Dtype dtype) {
  return ((static_cast<uint32_t>(dtype) >> 8) & 0xff) / 8;
}
constexpr bool dtype_is_float(Dtype d) {
  return d == Dtype::kF16 || d == Dtype::kF32 || d == Dtype::kF64 || d == Dtype::kBF16;
}

// bfloat16 and binary16 as bit patterns. Conversions round to nearest even, keep subnormals,
// infinities and NaN (NaNs become quiet).
SOTTO_HOST_DEVICE inline float bf16_to_f32(uint16_t h) {
  return std::bit_cast<float>(static_cast<uint32_t>(h) << 16);
}
SOTTO_HOST_DEVICE inline uint16_t f32_to_bf16(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x0040u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
SOTTO_HOST_DEVICE inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1fu;
  const uint32_t mantissa = h & 0x3ffu;
  if (exponent == 0x1f) {
    const uint32_t quiet = mantissa ? 0x00400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13) | quiet);
  }
  if (exponent == 0) {  // zero or subnormal: exact in float32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

SOTTO_HOST_DEVICE inline uint16_t f32_to_f16(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x47800000u)
    return static_cast<uint16_t>(sign | 0x7c00u);  // 2^16 and more, and infinity
  if (magnitude < 0x38800000u) {                   // below 2^-14: subnormal result
    // Adding 0.5 puts the rounding position of a binary16 subnormal (2^-24) at the last bit of the
    // float32 sum.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rebased = magnitude - 0x38000000u;  // exponent bias 127 -> 15
  const uint32_t rounded = rebased + 0xfffu + ((rebased >> 13) & 1u);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

// Element i of an array of float32, float16 or bfloat16.
SOTTO_HOST_DEVICE inline float float_at(Dtype type, const void* values, uint64_t i) {
  switch (type) {
    case Dtype::kBF16: return bf16_to_f32(static_cast<const uint16_t*>(values)[i]);
    case Dtype::kF16: return f16_to_f32(static_cast<const uint16_t*>(values)[i]);
    default: return static_cast<const float*>(values)[i];
  }
}

}  // namespace sotto
