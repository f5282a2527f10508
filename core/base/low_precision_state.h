// Optimizer state in fewer bits than float32: what an element is and how it is rounded. Plain
// integer arithmetic, the same on every device.
//
// Rounding is stochastic, since rounding to nearest would lose what is added to an average step by
// step: with b2 = 0.999 it is less than half of a bfloat16's last place, and v would stand still.
// Random bits are a function of the state step, the element and the array, so that every rank,
// device and thread rounds alike.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "core/base/host_device.h"

namespace sotto {

// Of momentum and variance. kFp8: 8-bit floats; kStateBlock elements of a tensor, the last ones
// maybe fewer, share an exponent.
enum class StateType : int32_t { kF32 = 1, kBf16 = 2, kFp8 = 3 };

constexpr std::string_view state_type_name(StateType type) {
  switch (type) {
    case StateType::kF32: return "fp32";
    case StateType::kBf16: return "bf16";
    case StateType::kFp8: return "fp8";
  }
  return "?";
}
// Of one element.
constexpr uint64_t state_type_bytes(StateType type) {
  return type == StateType::kF32 ? 4 : type == StateType::kBf16 ? 2 : 1;
}

inline constexpr uint32_t kStateBlock = 256;

// ---- random bits ----

// Of the elements of one norm block in one step.
struct RoundingKey {
  uint32_t add, factor;
};

SOTTO_HOST_DEVICE inline RoundingKey rounding_key(uint64_t step, uint64_t block) {
  uint64_t z = step * 0x9e3779b97f4a7c15u + block * 0xd1b54a32d192ed03u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return {static_cast<uint32_t>(z), static_cast<uint32_t>(z >> 32) | 1u};
}

// position: of the element in its norm block. Steps of one element are independent, and over many
// steps any two elements are; within a step elements are spread evenly. The upper bits are for m,
// the lower ones for v: 16 each for bfloat16, 20 for 8-bit floats.
SOTTO_HOST_DEVICE inline uint32_t rounding_bits(RoundingKey key, uint32_t position) {
  return key.add + position * key.factor;
}

// x, but no more (less) than the limit; of NaN the limit.
SOTTO_HOST_DEVICE inline float at_most(float x, float limit) { return x < limit ? x : limit; }
SOTTO_HOST_DEVICE inline float at_least(float x, float limit) { return x > limit ? x : limit; }
SOTTO_HOST_DEVICE inline float within(float x, float limit) {
  return at_least(at_most(x, limit), -limit);
}

// ---- bfloat16 ----

// Up to the next larger magnitude with the probability of what is lost otherwise; infinities and
// NaN become the largest finite number. random: 16 bits.
inline constexpr float kBf16Limit = 0x1.fep127f;
SOTTO_HOST_DEVICE inline uint16_t bf16_rounded(float x, uint32_t random) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(x) + random) >> 16);
}
SOTTO_HOST_DEVICE inline uint16_t bf16_m_code(float m, uint32_t bits) {
  return bf16_rounded(within(m, kBf16Limit), bits >> 16);
}
SOTTO_HOST_DEVICE inline uint16_t bf16_v_code(float v, uint32_t bits) {
  return bf16_rounded(at_most(v, kBf16Limit), bits & 0xffffu);
}

// ---- 8-bit floats ----
//
// A block has an exponent byte e. Code c stands for f(c), the float32 with the bits
// (c << 20) + base, eight codes for every power of two.
// The largest is f = 2^(e + kFp8LeastTop - 127).
//   v: f(c), c up to 255: down to 2^-32 of the largest. There is no 0: elements that have had no
//      gradient have the least v, and m = 0.
//   m: f(c) - f(0) with a sign (bit 7), c up to 127: steps shrink down to 2^-19 of the largest, and
//      there is a 0.
// As the root of v divides m, both reach equally far: what is left of a small m is never divided by
// a v that is too small for it.
//
// The exponent is the least that is enough for the largest element of the block. Rounding may leave
// one for which the next lower exponent would be enough; all values of v are codes of that one too,
// those of m need not be.
inline constexpr uint32_t kFp8LargestM = 127;
inline constexpr uint32_t kFp8LargestV = 255;
inline constexpr uint32_t kFp8LeastTop = 40;  // f(0) is far from the least normal float32
inline constexpr float kFp8Limit = 0x1p126f;  // of magnitudes

SOTTO_HOST_DEVICE inline uint32_t fp8_base(uint8_t exponent, uint32_t largest) {
  return ((exponent + kFp8LeastTop) << 23) - (largest << 20);
}
SOTTO_HOST_DEVICE inline float fp8_value(uint32_t code, uint32_t base) {
  return std::bit_cast<float>((code << 20) + base);
}
SOTTO_HOST_DEVICE inline float fp8_v_value(uint8_t code, uint32_t base) {
  return fp8_value(code, base);
}
SOTTO_HOST_DEVICE inline float fp8_m_value(uint8_t code, uint32_t base) {
  const float magnitude = fp8_value(code & 0x7fu, base) - fp8_value(0, base);
  return (code & 0x80u) != 0 ? -magnitude : magnitude;
}

// Exponent of a block whose largest magnitude this is; at most kFp8Limit.
SOTTO_HOST_DEVICE inline uint8_t fp8_v_exponent(float most) {
  const int32_t top = ((std::bit_cast<int32_t>(most) - 1) >> 23) + 1;
  const int32_t exponent = top - static_cast<int32_t>(kFp8LeastTop);
  return static_cast<uint8_t>(exponent > 0 ? exponent : 0);
}
SOTTO_HOST_DEVICE inline uint8_t fp8_m_exponent(float most) {
  return fp8_v_exponent(most * (1 + 0x1.2p-16f));  // f(0) comes on top
}

// Magnitudes are at most kFp8Limit and fit the exponent. random: 20 bits.
SOTTO_HOST_DEVICE inline uint8_t fp8_m_code(float m, uint32_t base, uint32_t random) {
  const uint32_t bits = std::bit_cast<uint32_t>(m);
  const float shifted = std::bit_cast<float>(bits & 0x7fffffffu) + fp8_value(0, base);
  const uint32_t code = (std::bit_cast<uint32_t>(shifted) + random - base) >> 20;
  return static_cast<uint8_t>(code | (bits >> 24 & 0x80u));
}
SOTTO_HOST_DEVICE inline uint8_t fp8_v_code(float v, uint32_t base, uint32_t random) {
  const float value = at_least(v, fp8_value(0, base));
  return static_cast<uint8_t>((std::bit_cast<uint32_t>(value) + random - base) >> 20);
}

}  // namespace sotto
