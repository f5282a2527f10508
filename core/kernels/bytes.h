// Kernels that move elements without computing with them, and those that change their type.
#pragma once

#include "core/kernels/schema.h"

namespace sotto {

struct FillArgs {
  uint8_t value;
};
struct PackArgs {
  uint64_t flat_base;  // flat index of the flat operand's first element
  uint32_t element_bytes;
};
struct ConvertArgs {
  Dtype from, to;
  float factor;
};
struct AccumulateArgs {
  Dtype source = Dtype::kF32;
  bool first = false;
};

namespace kernels {

inline uint32_t pack_bits(const void* args) {
  return static_cast<const PackArgs*>(args)->element_bytes * 8;
}
inline uint64_t pack_base(const void* args) {
  return static_cast<const PackArgs*>(args)->flat_base;
}

// out[0 .. bytes) = value.
template <class T>
struct FillOperands {
  T out{};
};
struct Fill {
  template <class T>
  using Operands = FillOperands<T>;
  using Args = FillArgs;
  static constexpr FillOperands<OperandSpec> kOperands = {
      .out = writes("out", Touched::kBytes, Element::kU8)};
  static constexpr Division kDivision = Division::kBytes;
};

// flat <- tensors.
template <class T>
struct PackOperands {
  T tensors{}, flat{};
};
struct Pack {
  template <class T>
  using Operands = PackOperands<T>;
  using Args = PackArgs;
  static constexpr PackOperands<OperandSpec> kOperands = {
      .tensors = sized(reads("tensors", Touched::kList), pack_bits),
      .flat = based(sized(writes("flat", Touched::kFlat), pack_bits), pack_base)};
  static constexpr Division kDivision = Division::kQuads;
};

// tensors[target] <- flat.
template <class T>
struct UnpackOperands {
  T flat{}, tensors{};
};
struct Unpack {
  template <class T>
  using Operands = UnpackOperands<T>;
  using Args = PackArgs;
  static constexpr UnpackOperands<OperandSpec> kOperands = {
      .flat = based(sized(reads("flat", Touched::kFlat), pack_bits), pack_base),
      .tensors = sized(writes("tensors", Touched::kTarget), pack_bits)};
  static constexpr Division kDivision = Division::kQuads;
};

// y = narrow(widen(x) * factor): the product in float32, one rounding to a 16-bit `to` (nearest
// even; a NaN stays one). `from` and `to` are float32, float16 or bfloat16.
template <class T>
struct ConvertOperands {
  T x{}, y{};
};
struct Convert {
  template <class T>
  using Operands = ConvertOperands<T>;
  using Args = ConvertArgs;
  static constexpr ConvertOperands<OperandSpec> kOperands = {
      .x = sized(reads("x", Touched::kList), dtype_bits<ConvertArgs, &ConvertArgs::from>),
      .y = sized(writes("y", Touched::kList), dtype_bits<ConvertArgs, &ConvertArgs::to>)};
  static constexpr Division kDivision = Division::kQuads;
  static constexpr PieceIndex kAlignment = &Piece::offset;
};

// Gradients of one more micro-batch: sum = (sum + x) * factor, or x * factor if it is the first.
// sum: list of float32. factor: a double, rounded to float32; 1 if it is absent.
template <class T>
struct AccumulateOperands {
  T x{}, sum{}, factor{};
};
struct Accumulate {
  template <class T>
  using Operands = AccumulateOperands<T>;
  using Args = AccumulateArgs;
  static constexpr AccumulateOperands<OperandSpec> kOperands = {
      .x = source<AccumulateArgs>("x"),
      .sum = updates("sum", Touched::kList),
      .factor = optional(reads("factor", Touched::kOne, Element::kF64))};
  static constexpr Division kDivision = Division::kQuads;
  static constexpr PieceIndex kAlignment = &Piece::offset;
};

}  // namespace kernels
}  // namespace sotto
