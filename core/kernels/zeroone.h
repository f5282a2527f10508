// 0/1 Adam (arXiv 2202.06009), specification section 6. Its variance is frozen by FreezeVariance
// (momentum.h).
#pragma once

#include "core/kernels/momentum.h"
#include "core/kernels/onebit.h"

namespace sotto {

struct ZeroOneGroupScalars : GroupScalars {
  float lr_sum = 0;  // learning rates since the last synchronisation, this one's too
  float decay = 1;   // product of 1 - lr * wd over the same steps
};

namespace kernels {

// Averaged gradient with the variance as it is (6.3): g' = g * clip, or +-R from bits; 0 where
// masked. m = b1*m + (1-b1)*g';  u = m / (sqrt(v) + eps) [+ wd*p];  p = p - float(lr)*u.
// g: source, or absent with bits and messages. m, v: flat. p: list.
template <class T>
struct FrozenAdamOperands {
  T g{}, bits{}, messages{}, m{}, v{}, p{}, scalars{}, clip{}, valid{};
};
struct FrozenAdam {
  template <class T>
  using Operands = FrozenAdamOperands<T>;
  using Args = SourceArgs;
  static constexpr FrozenAdamOperands<OperandSpec> kOperands = {
      .g = optional(source<SourceArgs>("g")),
      .bits = kMomentum.bits,
      .messages = kMomentum.messages,
      .m = updates("m", Touched::kFlat),
      .v = reads("v", Touched::kFlat),
      .p = updates("p", Touched::kList),
      .scalars = group_scalars<ZeroOneGroupScalars>(),
      .clip = clip_factor(),
      .valid = valid_bits()};
  static constexpr Division kDivision = Division::kQuads;
};

// Between synchronisations (6.4): m = b1*m + (1-b1)*g';  b = b - float(lr)*m;
// p = decay*anchor + b / den.  Masked: m = b = 0, p = decay*anchor.
template <class T>
struct ZeroOneLocalOperands {
  T g{}, m{}, b{}, den{}, anchor{}, p{}, scalars{}, clip{}, valid{};
};
struct ZeroOneLocal {
  template <class T>
  using Operands = ZeroOneLocalOperands<T>;
  using Args = SourceArgs;
  static constexpr ZeroOneLocalOperands<OperandSpec> kOperands = {
      .g = source<SourceArgs>("g"),
      .m = updates("m", Touched::kFlat),
      .b = updates("b", Touched::kFlat),
      .den = reads("den", Touched::kFlat),
      .anchor = reads("anchor", Touched::kFlat),
      .p = writes("p", Touched::kList),
      .scalars = group_scalars<ZeroOneGroupScalars>(),
      .clip = clip_factor(),
      .valid = valid_bits()};
  static constexpr Division kDivision = Division::kQuads;
};

// Encoder of a synchronisation: x = b - float(lr)*(b1*m + (1-b1)*g'), x = b without g; then as
// OnebitEncode.
// identity = 1 (one rank): nothing is encoded; c receives x (0 where masked; not finite: flag and
// 0); old_scales, bits and sums are absent.
template <class T>
struct ZeroOneEncodeOperands {
  T g{}, m{}, b{};
  EncoderOperands<T> to{};
  T scalars{}, clip{};
};
inline constexpr ZeroOneEncodeOperands<OperandSpec> kZeroOneEncode = {
    .g = optional(source<EncodeArgs>("g")),
    .m = reads("m", Touched::kFlat),
    .b = reads("b", Touched::kFlat),
    .to = kEncoder,
    .scalars = group_scalars<ZeroOneGroupScalars>(),
    .clip = clip_factor()};
// As OnebitEncodeUndo, with x as in ZeroOneEncode.
struct ZeroOneEncodeUndo {
  template <class T>
  using Operands = ZeroOneEncodeOperands<T>;
  using Args = EncodeArgs;
  static constexpr ZeroOneEncodeOperands<OperandSpec> kOperands = {
      .g = kZeroOneEncode.g,
      .m = kZeroOneEncode.m,
      .b = kZeroOneEncode.b,
      .to = kEncoderUndo,
      .scalars = kZeroOneEncode.scalars,
      .clip = kZeroOneEncode.clip};
  static constexpr Division kDivision = Division::kQuads;
};
struct ZeroOneEncode {
  template <class T>
  using Operands = ZeroOneEncodeOperands<T>;
  using Args = EncodeArgs;
  using Undo = ZeroOneEncodeUndo;
  static constexpr ZeroOneEncodeOperands<OperandSpec> kOperands = kZeroOneEncode;
  static constexpr Division kDivision = Division::kNorms;
};

// Synchronisation: x as floats or +-R from bits, 0 where masked; anchor = p = decay*anchor +
// x / den;  m = -x / lr_sum (as it is if lr_sum is 0; 0 where masked);  b = 0.
template <class T>
struct ZeroOneSyncOperands {
  MomentumOperands<T> x{};
  T m{}, b{}, den{}, anchor{}, p{}, scalars{}, valid{};
};
struct ZeroOneSync {
  template <class T>
  using Operands = ZeroOneSyncOperands<T>;
  using Args = NoArgs;
  static constexpr ZeroOneSyncOperands<OperandSpec> kOperands = {
      .x = kMomentum,
      .m = updates("m", Touched::kFlat),
      .b = writes("b", Touched::kFlat),
      .den = reads("den", Touched::kFlat),
      .anchor = updates("anchor", Touched::kFlat),
      .p = writes("p", Touched::kList),
      .scalars = group_scalars<ZeroOneGroupScalars>(),
      .valid = valid_bits()};
  static constexpr Division kDivision = Division::kQuads;
};

// 0/1 Adam as published (6.4, mode compat): parameters are updated in place. What its three kernels
// share; g is absent where this step has no gradient.
template <class T>
struct InPlaceOperands {
  T g{}, m{}, b{}, den{}, p{}, scalars{}, clip{};
};
inline constexpr InPlaceOperands<OperandSpec> kInPlace = {
    .g = optional(source<SourceArgs>("g")),
    .m = updates("m", Touched::kFlat),
    .b = updates("b", Touched::kFlat),
    .den = reads("den", Touched::kFlat),
    .p = updates("p", Touched::kList),
    .scalars = group_scalars<ZeroOneGroupScalars>(),
    .clip = clip_factor()};

// Between synchronisations: m = b1*m + (1-b1)*g';  step = float(lr)*(m / den [+ wd*p]);
// p = p - step;  b = b - step.  No element is masked.
struct ZeroOneInPlaceLocal {
  template <class T>
  using Operands = InPlaceOperands<T>;
  using Args = SourceArgs;
  static constexpr InPlaceOperands<OperandSpec> kOperands = kInPlace;
  static constexpr Division kDivision = Division::kQuads;
};

// What a synchronisation averages: x = b * den, with b as ZeroOneInPlaceLocal would leave it, or as
// it is without g. A value that is not finite raises the flag. x: list.
template <class T>
struct ZeroOneInPlaceSumOperands {
  InPlaceOperands<T> state{};
  T x{}, flags{};
};
struct ZeroOneInPlaceSum {
  template <class T>
  using Operands = ZeroOneInPlaceSumOperands<T>;
  using Args = SourceArgs;
  static constexpr ZeroOneInPlaceSumOperands<OperandSpec> kOperands = {
      .state = {.g = kInPlace.g,
                .m = reads("m", Touched::kFlat),
                .b = reads("b", Touched::kFlat),
                .den = kInPlace.den,
                .p = reads("p", Touched::kList),
                .scalars = kInPlace.scalars,
                .clip = kInPlace.clip},
      .x = writes("x", Touched::kList),
      .flags = optional(raised_flags())};
  static constexpr Division kDivision = Division::kQuads;
};

// The synchronisation: m, p, b as ZeroOneInPlaceLocal would leave them, or as they are without g; x
// from a list of floats, or +-R from bits, 0 where masked;  p = (p - b) + x / den;  m = -x / lr_sum
// (as it is if lr_sum is 0);  b = 0.
template <class T>
struct ZeroOneInPlaceSyncOperands {
  InPlaceOperands<T> state{};
  T x{}, bits{}, messages{}, valid{};
};
struct ZeroOneInPlaceSync {
  template <class T>
  using Operands = ZeroOneInPlaceSyncOperands<T>;
  using Args = SourceArgs;
  static constexpr ZeroOneInPlaceSyncOperands<OperandSpec> kOperands = {
      .state = kInPlace,
      .x = optional(reads("x", Touched::kList)),
      .bits = kMomentum.bits,
      .messages = kMomentum.messages,
      .valid = valid_bits()};
  static constexpr Division kDivision = Division::kQuads;
};

}  // namespace kernels

SOTTO_HOST_DEVICE inline void frozen_adam_element(const ZeroOneGroupScalars& s, float lr, float g,
                                                  float* m, float v, float* p) {
  *m = s.b1 * *m + s.one_minus_b1 * g;
  *p = *p - lr * with_decay(s, *m / denominator(s, v), *p);
}

SOTTO_HOST_DEVICE inline void zeroone_local_element(const ZeroOneGroupScalars& s, float lr,
                                                    bool masked, float g, float* m, float* b,
                                                    float den, float anchor, float* p) {
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
SOTTO_HOST_DEVICE inline float zeroone_encode_input(const ZeroOneGroupScalars& s, float m, float b,
                                                    float g) {
  const float momentum = s.b1 * m + s.one_minus_b1 * g;
  return b - static_cast<float>(s.lr) * momentum;
}

// x: what was averaged; any value where masked.
SOTTO_HOST_DEVICE inline void zeroone_sync_element(const ZeroOneGroupScalars& s, bool masked,
                                                   float x, float* m, float* b, float den,
                                                   float* anchor, float* p) {
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
SOTTO_HOST_DEVICE inline void zeroone_in_place_element(const ZeroOneGroupScalars& s, float g,
                                                       float* m, float* b, float den, float* p) {
  *m = s.b1 * *m + s.one_minus_b1 * g;
  const float step = static_cast<float>(s.lr) * with_decay(s, *m / den, *p);
  *p = *p - step;
  *b = *b - step;
}

// Its synchronisation. x: what was averaged, 0 where masked.
SOTTO_HOST_DEVICE inline void zeroone_in_place_sync_element(const ZeroOneGroupScalars& s, float x,
                                                            float* m, float* b, float den,
                                                            float* p) {
  *p = (*p - *b) + x / den;
  if (s.lr_sum != 0.0f) *m = -x / s.lr_sum;
  *b = 0.0f;
}

}  // namespace sotto
