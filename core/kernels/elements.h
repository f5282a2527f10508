// The arithmetic of one element, as the contracts write it, for every device: scalar kernels are
// made of these, vector kernels use them for the elements before and after whole groups, and CUDA
// kernels compile the same functions. One rounding per written operation: compile without
// contraction to fused multiply-add.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

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

// Number `index` of messages, counted in float32.
SOTTO_HOST_DEVICE inline float message_scale(const uint8_t* messages, uint64_t index) {
  float scale;
  std::memcpy(&scale, messages + 4 * index, sizeof scale);
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

// Sum of term(rank) over ranks: groups of 8, each from 0 in ascending order.
template <class Term>
SOTTO_HOST_DEVICE inline float sum_of_ranks(uint32_t world, Term&& term) {
  float total = 0.0f;
  for (uint32_t group = 0; group < world; group += 8) {
    float partial = 0.0f;
    for (uint32_t r = group; r < world && r < group + 8; ++r) partial += term(r);
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

SOTTO_HOST_DEVICE inline float adam_parameter(const GroupScalars& s, float m, float v, float p,
                                              float lr) {
  float u = (m * (1.0f / s.c1)) / (std::sqrt(v * (1.0f / s.c2)) + s.eps);
  if (s.decoupled != 0) u = with_decay(s, u, p);
  return p - lr * u;
}

// g: after clipping and mask.
SOTTO_HOST_DEVICE inline void adam_element(const GroupScalars& s, float lr, float g,
                                           Moments* moments, float* p) {
  if (s.decoupled == 0) g = with_decay(s, g, *p);
  *moments = adam_moments(s, moments->m, moments->v, g);
  *p = adam_parameter(s, moments->m, moments->v, *p, lr);
}

SOTTO_HOST_DEVICE inline float lamb_direction(const GroupScalars& s, float m, float v, float p) {
  const float den = s.eps_inside_sqrt != 0 ? std::sqrt(v + s.eps) : std::sqrt(v) + s.eps;
  return with_decay(s, m / den, p);
}

// m is left alone without momentum.
SOTTO_HOST_DEVICE inline void sgd_element(const GroupScalars& s, float lr, bool momentum,
                                          bool nesterov, float g, float* m, float* p) {
  const float gradient = with_decay(s, g, *p);
  float direction = gradient;
  if (momentum) {
    *m = s.b1 * *m + s.one_minus_b1 * gradient;
    direction = nesterov ? gradient + s.b1 * *m : *m;
  }
  *p = *p - lr * direction;
}

// Input of the encoder of 1-bit LAMB. scaling: float(scaling_coeff).
SOTTO_HOST_DEVICE inline float onebit_lamb_input(const GroupScalars& s, float m, float g,
                                                 float scaling) {
  return (s.b1 * m + s.one_minus_b1 * g) * scaling;
}

// (1-b2)*gr*gr, gr the gradient that momentum `m` after `old` implies.
SOTTO_HOST_DEVICE inline float fresh_square(const GroupScalars& s, float m, float old) {
  const float g = (m - s.b1 * old) / s.one_minus_b1;
  return (s.one_minus_b2 * g) * g;
}

SOTTO_HOST_DEVICE inline float fresh_variance(const GroupScalars& s, float m, float old, float vf) {
  return s.b2 * vf + fresh_square(s, m, old);
}

// What a variance is divided by.
SOTTO_HOST_DEVICE inline float denominator(const GroupScalars& s, float v) {
  return std::sqrt(v) + s.eps;
}

SOTTO_HOST_DEVICE inline void frozen_adam_element(const GroupScalars& s, float lr, float g,
                                                  float* m, float v, float* p) {
  *m = s.b1 * *m + s.one_minus_b1 * g;
  *p = *p - lr * with_decay(s, *m / denominator(s, v), *p);
}

SOTTO_HOST_DEVICE inline void zeroone_local_element(const GroupScalars& s, float lr, bool masked,
                                                    float g, float* m, float* b, float den,
                                                    float anchor, float* p) {
  if (masked) {
    *m = *b = 0.0f;
    *p = s.decay * anchor;
    return;
  }
  *m = s.b1 * *m + s.one_minus_b1 * g;
  *b = *b - lr * *m;
  *p = s.decay * anchor + *b / den;
}

// Input of the encoder of 0/1 Adam.
SOTTO_HOST_DEVICE inline float zeroone_encode_input(const GroupScalars& s, float m, float b,
                                                    float g) {
  const float momentum = s.b1 * m + s.one_minus_b1 * g;
  return b - static_cast<float>(s.lr) * momentum;
}

// x: what was averaged; any value where masked.
SOTTO_HOST_DEVICE inline void zeroone_sync_element(const GroupScalars& s, bool masked, float x,
                                                   float* m, float* b, float den, float* anchor,
                                                   float* p) {
  float step = 0.0f;
  if (masked) {
    *m = 0.0f;
  } else {
    step = x / den;
    if (s.lr_sum != 0.0f) *m = -x / s.lr_sum;
  }
  *b = 0.0f;
  *anchor = *p = s.decay * *anchor + step;
}

// 0/1 Adam as published: an element after a local update.
SOTTO_HOST_DEVICE inline void zeroone_in_place_element(const GroupScalars& s, float g, float* m,
                                                       float* b, float den, float* p) {
  *m = s.b1 * *m + s.one_minus_b1 * g;
  const float step = static_cast<float>(s.lr) * with_decay(s, *m / den, *p);
  *p = *p - step;
  *b = *b - step;
}

// Its synchronisation. x: what was averaged, 0 where masked.
SOTTO_HOST_DEVICE inline void zeroone_in_place_sync_element(const GroupScalars& s, float x,
                                                            float* m, float* b, float den,
                                                            float* p) {
  *p = (*p - *b) + x / den;
  if (s.lr_sum != 0.0f) *m = -x / s.lr_sum;
  *b = 0.0f;
}

}  // namespace sotto
