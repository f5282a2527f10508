#include "core/base/dtype.h"

namespace sotto {

bool dtype_known(uint32_t code) {
  switch (static_cast<Dtype>(code)) {
    case Dtype::kI8:
    case Dtype::kI32:
    case Dtype::kI64:
    case Dtype::kU8:
    case Dtype::kU32:
    case Dtype::kU64:
    case Dtype::kF16:
    case Dtype::kF32:
    case Dtype::kF64:
    case Dtype::kBF16: return true;
  }
  return false;
}

std::string_view dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kI8: return "int8";
    case Dtype::kI32: return "int32";
    case Dtype::kI64: return "int64";
    case Dtype::kU8: return "uint8";
    case Dtype::kU32: return "uint32";
    case Dtype::kU64: return "uint64";
    case Dtype::kF16: return "fp16";
    case Dtype::kF32: return "fp32";
    case Dtype::kF64: return "fp64";
    case Dtype::kBF16: return "bf16";
  }
  return "unknown";
}

float f16_to_f32(uint16_t h) {
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

uint16_t f32_to_f16(float f) {
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

}  // namespace sotto
