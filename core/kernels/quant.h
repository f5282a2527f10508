// Casts to 16-bit floats and integers by blocks, with or without error feedback.
#pragma once

#include "core/base/codec.h"
#include "core/kernels/schema.h"

namespace sotto {

struct QuantArgs {
  uint64_t base;       // encoder and undo: flat index of the payload's first element
  uint64_t row_bytes;  // server
  uint32_t block;      // integers: elements per scale
  uint32_t world;      // server
  CodecKind kind;
};

namespace kernels {

// Encoder. x' = isfinite(x) ? x : 0 (and flags |= kFlagNonfinite); c = x' + e (without residual:
// x'; padding: 0); code and value v of c as below; e = c - v.
//   bf16, fp16: c rounded to nearest even; if that is not finite: flag, code 0.
//   integers of k bits (L = 2^(k-1) - 1), by blocks of the flat space: a = max |c|; a block with
//   a < 2^-120 has scale and codes 0, so has one where fl(s*L) is not finite, which raises the
//   flag; else s = fl(a * fl(1/L)), code q = c * fl(L/a) rounded to nearest even, within +-L, v =
//   fl(q*s).
// A unit of the payload is the codes and then s; the one of flat element QuantArgs::base is first.
// A call has whole blocks; where a block has several pieces they lie one after the other.
// x: list of float32. e: flat, absent without residual.
template <class T>
struct QuantEncodeOperands {
  T x{}, e{}, payload{}, flags{};
};
// Takes an encoding back if call.paired_ran: c = e + v; e = isfinite(c) ? c - x' : 0.
struct QuantEncodeUndo {
  template <class T>
  using Operands = QuantEncodeOperands<T>;
  using Args = QuantArgs;
  static constexpr QuantEncodeOperands<OperandSpec> kOperands = {
      .x = reads("x", Touched::kList),
      .e = updates("e", Touched::kFlat),
      .payload = reads("payload", Touched::kArguments, Element::kU8),
      .flags = untouched("flags")};
  static constexpr Division kDivision = Division::kQuads;
};
struct QuantEncode {
  template <class T>
  using Operands = QuantEncodeOperands<T>;
  using Args = QuantArgs;
  using Undo = QuantEncodeUndo;
  static constexpr QuantEncodeOperands<OperandSpec> kOperands = {
      .x = reads("x", Touched::kList),
      .e = optional(updates("e", Touched::kFlat)),
      .payload = writes("payload", Touched::kArguments, Element::kU8),
      .flags = raised_flags()};
  static constexpr Division kDivision = Division::kFlatSpace;
};

// Server. t_r = fl(v_r * fl(1/W)) (integers: fl(q_r * fl(s_r * fl(1/W)))), added in groups of 8
// ranks as in OnebitServer; c = sum + e; then as in QuantEncode. A sum that is not finite raises
// the flag and counts as 0. Rows may hold any bytes; padding in them is not read.
// rows: payload of row r at r * row_bytes; flat counts from the start of this rank's chunk. e and
// new_e: flat, absent without residual.
template <class T>
struct QuantServerOperands {
  T rows{}, e{}, new_e{}, payload{}, flags{};
};
struct QuantServer {
  template <class T>
  using Operands = QuantServerOperands<T>;
  using Args = QuantArgs;
  static constexpr QuantServerOperands<OperandSpec> kOperands = {
      .rows = reads("rows", Touched::kArguments, Element::kU8),
      .e = replaced(optional(reads("e", Touched::kFlat))),
      .new_e = optional(writes("new_e", Touched::kFlat)),
      .payload = writes("payload", Touched::kArguments, Element::kU8),
      .flags = raised_flags()};
  static constexpr Division kDivision = Division::kFlatSpace;
};

// y = v. Any bytes may be decoded; a scale that is not finite counts as 0. payload: of flat element
// 0 first. y: list of float32 at `target`.
template <class T>
struct QuantDecodeOperands {
  T payload{}, y{};
};
struct QuantDecode {
  template <class T>
  using Operands = QuantDecodeOperands<T>;
  using Args = QuantArgs;
  static constexpr QuantDecodeOperands<OperandSpec> kOperands = {
      .payload = reads("payload", Touched::kArguments, Element::kU8),
      .y = writes("y", Touched::kTarget)};
  static constexpr Division kDivision = Division::kQuads;
  static constexpr PieceIndex kAlignment = &Piece::target;
};

}  // namespace kernels
}  // namespace sotto
