// Casts and blockwise integers: the arithmetic of one element and of one block, for every device.
#pragma once

#include "core/kernels/elements.h"

namespace sotto {

// Blocks whose largest magnitude is below this have scale 0: 127 / amax would come near overflow.
inline constexpr float kSmallestQuantMax = 0x1p-120f;

// The largest number: 127 of 8 bits, 7 of 4.
SOTTO_HOST_DEVICE constexpr float quant_limit(CodecKind kind) {
  return static_cast<float>((1 << (codec_bits(kind) - 1)) - 1);
}

struct QuantScale {
  float scale = 0;    // of numbers
  float inverse = 0;  // c * inverse is rounded to the number; at most the limit for |c| <= amax
};

// max_bits: the largest |c| of a block, as its bits (so infinities and NaN are the largest).
SOTTO_HOST_DEVICE inline QuantScale quant_scale(CodecKind kind, uint32_t max_bits,
                                                uint32_t* flags) {
  const float amax = std::bit_cast<float>(max_bits);
  const float limit = quant_limit(kind);
  if (amax < kSmallestQuantMax) return {};
  const float scale = amax * (1.0f / limit);
  if (!is_finite(scale * limit)) {
    *flags |= kFlagNonfinite;
    return {};
  }
  return {scale, limit / amax};
}

// To nearest even, for |x| < 2^22.
SOTTO_HOST_DEVICE inline float round_even(float x) {
  constexpr float kShift = 0x1.8p23f;
  return (x + kShift) - kShift;
}

SOTTO_HOST_DEVICE inline float half_value(CodecKind kind, uint16_t code) {
  return kind == CodecKind::kBf16 ? bf16_to_f32(code) : f16_to_f32(code);
}
SOTTO_HOST_DEVICE inline uint16_t half_code(CodecKind kind, float x) {
  return kind == CodecKind::kBf16 ? f32_to_bf16(x) : f32_to_f16(x);
}

// The number that the code of element i of a block stands for: its value is that times the scale.
SOTTO_HOST_DEVICE inline float quant_number(CodecKind kind, const uint8_t* unit, uint32_t i) {
  const uint32_t bits = codec_bits(kind), per_byte = 8 / bits;
  const uint32_t shift = 8 - bits * (i % per_byte + 1);
  const auto code = static_cast<int32_t>(unit[i / per_byte] >> shift & ((1u << bits) - 1));
  const int32_t sign = 1 << (bits - 1);
  return static_cast<float>((code ^ sign) - sign);
}

// The byte of the codes of as many numbers as it has room for.
SOTTO_HOST_DEVICE inline uint8_t packed_codes(CodecKind kind, const float* numbers) {
  const uint32_t bits = codec_bits(kind);
  uint32_t byte = 0;
  for (uint32_t i = 0; i < 8 / bits; ++i)
    byte = byte << bits |
           (static_cast<uint32_t>(static_cast<int32_t>(numbers[i])) & ((1u << bits) - 1));
  return static_cast<uint8_t>(byte);
}

// The scale behind the codes of a unit, whatever its bytes are.
SOTTO_HOST_DEVICE inline float stored_scale(const uint8_t* unit, PayloadUnit size) {
  float scale;
  std::memcpy(&scale, unit + size.bytes - 4, 4);
  return scale;
}
SOTTO_HOST_DEVICE inline float decoded_scale(const uint8_t* unit, PayloadUnit size) {
  const float scale = stored_scale(unit, size);
  return is_finite(scale) ? scale : 0.0f;
}

// A 16-bit code of c, or 0 and the flag.
SOTTO_HOST_DEVICE inline uint16_t guarded_half_code(CodecKind kind, float c, uint32_t* flags) {
  const uint16_t code = half_code(kind, c);
  if (is_finite(half_value(kind, code))) return code;
  *flags |= kFlagNonfinite;
  return 0;
}

// The number that stands for c.
SOTTO_HOST_DEVICE inline float quant_round(QuantScale s, float c) {
  return s.scale != 0.0f ? round_even(c * s.inverse) : 0.0f;
}

// Of |x|; in the order of magnitudes, infinities and NaN last.
SOTTO_HOST_DEVICE inline uint32_t magnitude_bits(float x) {
  return std::bit_cast<uint32_t>(x) & 0x7fffffffu;
}

// The residual after an encoding was taken back; v: what was decoded.
SOTTO_HOST_DEVICE inline float quant_undo(float e, float v, float x) {
  const float c = e + v;
  uint32_t unused = 0;
  return is_finite(c) ? c - guard_finite(x, &unused) : 0.0f;
}

}  // namespace sotto
