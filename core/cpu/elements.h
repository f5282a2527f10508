// The arithmetic of one element, as kernels.h writes it. Scalar kernels are made of these; vector
// kernels use them for the elements before and after whole groups.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/base/dtype.h"
#include "core/cpu/bits.h"
#include "core/iface/kernels.h"

namespace sotto {

inline float plus_minus(bool bit, float magnitude) { return bit ? magnitude : -magnitude; }
inline bool is_finite(float x) { return (std::bit_cast<uint32_t>(x) & 0x7fffffffu) < 0x7f800000u; }

// e = c - sgn(c) * scale.
inline float residual_of(float c, float scale) { return c - plus_minus(c >= 0.0f, scale); }

inline float norm_term(ScaleKind kind, float c) {
  return kind == ScaleKind::kL2 ? c * c : std::fabs(c);
}

// x itself, or 0 and the flag.
inline float guard_finite(float x, uint32_t* flags) {
  if (is_finite(x)) return x;
  *flags |= kFlagNonfinite;
  return 0.0f;
}

// Threads of one call may meet here.
inline void raise_flags(uint32_t* target, uint32_t flags) {
  if (flags != 0) std::atomic_ref<uint32_t>(*target).fetch_or(flags, std::memory_order_relaxed);
}

// Number `index` of messages, counted in float32.
inline float message_scale(const uint8_t* messages, uint64_t index) {
  float scale;
  std::memcpy(&scale, messages + 4 * index, sizeof scale);
  return scale;
}

// What the undo kernels leave in c. x: the guarded input of the encoder.
inline float undo_encode(float c, float x, float scale, bool paired_ran) {
  if (!paired_ran) return residual_of(c, scale);
  return is_finite(c) ? c - x : 0.0f;
}

// Elements of a float type, read as float32.
struct Floats {
  const uint8_t* data;
  Dtype type;

  float operator[](uint64_t i) const { return float_at(type, data, i); }
};

// A source operand.
struct Source {
  const Operand* operand;
  Dtype type;

  // Element 0 of the piece is the first.
  Floats of(const Piece& piece) const {
    return {operand->list<const uint8_t>(piece.tensor) + piece.offset * dtype_bytes(type), type};
  }
};

// Momentum of 1-bit LAMB: floats, or bits and a magnitude per chunk and tensor.
struct Momentum {
  const float* floats;
  const uint8_t* bits;
  const uint8_t* messages;

  float magnitude(const Piece& piece, float scaling) const {
    return bits == nullptr ? 0.0f : message_scale(messages, piece.message) / scaling;
  }
  float at(uint64_t flat, float magnitude) const {
    return bits == nullptr ? floats[flat] : plus_minus(get_bit(bits, flat), magnitude);
  }
};

struct Moments {
  float m, v;
};

// g: gradient after clipping, mask and (L2 mode) weight decay.
inline Moments adam_moments(const GroupScalars& s, float m, float v, float g) {
  return {s.b1 * m + s.one_minus_b1 * g, s.b2 * v + (s.one_minus_b2 * g) * g};
}

inline float adam_parameter(const GroupScalars& s, float m, float v, float p, float lr) {
  float u = (m * (1.0f / s.c1)) / (std::sqrt(v * (1.0f / s.c2)) + s.eps);
  if (s.decoupled != 0 && s.weight_decay != 0.0f) u = u + s.weight_decay * p;
  return p - lr * u;
}

inline float lamb_direction(const GroupScalars& s, float m, float v, float p) {
  const float den = s.eps_inside_sqrt != 0 ? std::sqrt(v + s.eps) : std::sqrt(v) + s.eps;
  const float u = m / den;
  return s.weight_decay != 0.0f ? u + s.weight_decay * p : u;
}

// Input of the encoder of 1-bit LAMB. scaling: float(scaling_coeff).
inline float front_input(const GroupScalars& s, float m, float g, float scaling) {
  return (s.b1 * m + s.one_minus_b1 * g) * scaling;
}

// (1-b2)*gr*gr, gr the gradient that momentum `m` after `old` implies.
inline float fresh_square(const GroupScalars& s, float m, float old) {
  const float g = (m - s.b1 * old) / s.one_minus_b1;
  return (s.one_minus_b2 * g) * g;
}

inline float fresh_variance(const GroupScalars& s, float m, float old, float vf) {
  return s.b2 * vf + fresh_square(s, m, old);
}

inline float with_decay(const GroupScalars& s, float u, float p) {
  return s.weight_decay != 0.0f ? u + s.weight_decay * p : u;
}

}  // namespace sotto
