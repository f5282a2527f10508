// The arithmetic of one element, as the contracts write it, for every device: scalar kernels are
// made of these, vector kernels use them for the elements before and after whole groups, and CUDA
// kernels compile the same functions. One rounding per written operation: compile without
// contraction to fused multiply-add.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "core/base/bits.h"
#include "core/base/dtype.h"
#include "core/kernels/call.h"

namespace sotto {

SOTTO_HOST_DEVICE inline float plus_minus(bool bit, float magnitude) {
  return bit ? magnitude : -magnitude;
}
SOTTO_HOST_DEVICE inline bool is_finite(float x) {
  return (std::bit_cast<uint32_t>(x) & 0x7fffffffu) < 0x7f800000u;
}
SOTTO_HOST_DEVICE inline bool is_nan(float x) {
  return (std::bit_cast<uint32_t>(x) & 0x7fffffffu) > 0x7f800000u;
}

// e = c - sgn(c) * scale.
SOTTO_HOST_DEVICE inline float residual_of(float c, float scale) {
  return c - plus_minus(c >= 0.0f, scale);
}

SOTTO_HOST_DEVICE inline float norm_term(ScaleKind kind, float c) {
  return kind == ScaleKind::kL2 ? c * c : std::fabs(c);
}

// x itself, or 0 and the flag.
SOTTO_HOST_DEVICE inline float guard_finite(float x, uint32_t* flags) {
  if (is_finite(x)) return x;
  *flags |= kFlagNonfinite;
  return 0.0f;
}

// Number `index` of messages, counted in float32. Messages lie at multiples of 4 bytes.
SOTTO_HOST_DEVICE inline float message_scale(const uint8_t* messages, uint64_t index) {
  float scale;
  std::memcpy(&scale, std::assume_aligned<4>(messages + 4 * index), sizeof scale);
  return scale;
}

// What an encoder makes of its input and of the c and scale of the last time.
SOTTO_HOST_DEVICE inline float encode_value(float x, float c, float scale, uint32_t* flags) {
  return guard_finite(x, flags) + residual_of(c, scale);
}

// What the undo kernels leave in c. x: the guarded input of the encoder.
SOTTO_HOST_DEVICE inline float undo_encode(float c, float x, float scale, bool paired_ran) {
  if (!paired_ran) return residual_of(c, scale);
  return is_finite(c) ? c - x : 0.0f;
}

// Ranks whose terms are added before they join a sum (specification 1.6).
inline constexpr uint32_t kGroupRanks = 8;

// Sum of term(rank) over ranks: groups, each from 0 in ascending order.
template <class Term>
SOTTO_HOST_DEVICE inline float sum_of_ranks(uint32_t world, Term&& term) {
  float total = 0.0f;
  for (uint32_t group = 0; group < world; group += kGroupRanks) {
    float partial = 0.0f;
    for (uint32_t r = group; r < world && r < group + kGroupRanks; ++r) partial += term(r);
    total += partial;
  }
  return total;
}

// Rounds to bfloat16 or float16. A NaN stays one.
SOTTO_HOST_DEVICE inline uint16_t narrow(Dtype type, float x) {
  if (type == Dtype::kBF16) return is_nan(x) ? uint16_t{0x7fc0} : f32_to_bf16(x);
  return is_nan(x) ? uint16_t{0x7e00} : f32_to_f16(x);
}

// Elements of a float type, read as float32.
struct Floats {
  const uint8_t* data;
  Dtype type;

  SOTTO_HOST_DEVICE float operator[](uint64_t i) const { return float_at(type, data, i); }
  SOTTO_HOST_DEVICE Floats from(uint64_t i) const { return {data + i * dtype_bytes(type), type}; }
};

// A source operand.
struct Source {
  const Operand* operand;
  Dtype type;

  // Element 0 of the piece is the first.
  SOTTO_HOST_DEVICE Floats of(const Piece& piece) const {
    return {operand->list<const uint8_t>(piece.tensor) + piece.offset * dtype_bytes(type), type};
  }
};

// Momentum of 1-bit LAMB: floats, or bits and a magnitude per chunk and tensor.
struct Momentum {
  const float* floats;
  const uint8_t* bits;
  const uint8_t* messages;

  SOTTO_HOST_DEVICE float magnitude(const Piece& piece, float scaling) const {
    return bits == nullptr ? 0.0f : message_scale(messages, piece.message) / scaling;
  }
  SOTTO_HOST_DEVICE float at(uint64_t flat, float magnitude) const {
    return bits == nullptr ? floats[flat] : plus_minus(get_bit(bits, flat), magnitude);
  }
};

SOTTO_HOST_DEVICE inline float scaling_of(const TensorState* states, const Piece& p) {
  return static_cast<float>(states[p.tensor].scaling_coeff);
}

struct Moments {
  float m, v;
};

// g: gradient after clipping, mask and (L2 mode) weight decay.
SOTTO_HOST_DEVICE inline Moments adam_moments(const GroupScalars& s, float m, float v, float g) {
  return {s.b1 * m + s.one_minus_b1 * g, s.b2 * v + (s.one_minus_b2 * g) * g};
}

SOTTO_HOST_DEVICE inline float with_decay(const GroupScalars& s, float u, float p) {
  return s.weight_decay != 0.0f ? u + s.weight_decay * p : u;
}

// What a variance is divided by.
SOTTO_HOST_DEVICE inline float denominator(const GroupScalars& s, float v) {
  return std::sqrt(v) + s.eps;
}

}  // namespace sotto
