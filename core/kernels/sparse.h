// Codecs that send the largest elements of every block of a tensor (specification sparse-loco,
// sections 3 to 7). What a block is on the wire: core/base/sparse.h.
#pragma once

#include "core/base/sparse.h"
#include "core/kernels/schema.h"

namespace sotto {

struct SparseArgs {
  SparseSettings settings;
  uint64_t base = 0;          // byte of all payloads where the payload operand begins
  uint64_t row_bytes = 0;     // the same: from the payload of a rank to that of the next one
  uint32_t world = 1;         // SparseSquares, SparseMean
  uint32_t weight_bytes = 0;  // SparseMean: from the weight of a rank to that of the next one
};

// ranges: a tensor and its blocks, of those that are sent as selections.
struct SparseMedianArgs {
  const NormRange* ranges;
  uint64_t n;
  uint32_t world;
  uint32_t weight_bytes;  // from the weight of a rank to that of the next one
};

namespace kernels {

template <class Args>
uint64_t sparse_weights_bytes(const void* args) {
  const auto& a = *static_cast<const Args*>(args);
  return uint64_t{a.world - 1} * a.weight_bytes + 4;
}

// Pieces of these kernels are runs of whole blocks of a tensor: `offset` is a multiple of the
// settings' block, and so are the elements of a piece, unless it ends with the tensor. Their norm
// blocks begin with the piece, so that calls are cut between blocks. Element `offset` of a tensor
// with payload begins at byte (target - offset) + (offset / block) * P of all payloads, P that of a
// whole block; where Piece::scale is 1 elements are sent as float32, from byte (target - offset) +
// 4 * offset on.

// Encoder. x' = isfinite(x) ? x : 0; c = fl(fl(fl(error_decay) * e) + x'), or x' where float32 is
// sent. An x or a c that is not finite raises the flag.
//   Selection: the k elements with the largest |c|, by the 31 bits of it; of equal ones the lower
//   index. They are v_0 .. v_(k-1) in ascending index order, a_j = |v_j|. S(set): sum of its a_j
//   in float64, in lane j % 8 in ascending j, others adding 0; lanes are folded by 4, 2, 1.
//   2 bits: mean = fl(S(all) / k), that quotient in float64, t = 0 if an a_j is 0, else mean;
//   high_j = a_j > t, n_h of them; lo = bf16(fl(S(others) / (k - n_h))), hi = bf16(fl(S(high) /
//   n_h)), lo without high ones; q_j = sgn(v_j) * (high_j ? hi : lo), code 2 * (v_j >= 0) + high_j.
//   Levels: lo, hi. If one is not finite both are 0, and the flag is raised. 4, 8 bits: q, codes
//   and scale as of a block of that many bits in QuantEncode. 32 bits: q = v. e = c - q where
//   selected, else c. e of what is sent as float32 is neither read nor written.
// weight, optional: 0: this rank's payload counts nothing, so e = c.
// x: list of float32. e: flat. payload: a part of a call writes its pieces' bytes and leaves the
// others.
template <class T>
struct SparseEncodeOperands {
  T x{}, e{}, payload{}, flags{}, weight{};
};
// Takes an encoding back if call.paired_ran: c = e + q where selected (weight not 0), else e; e =
// error_decay is 0 or c is not finite ? 0 : fl(fl(c - x') / error_decay).
struct SparseEncodeUndo {
  template <class T>
  using Operands = SparseEncodeOperands<T>;
  using Args = SparseArgs;
  static constexpr SparseEncodeOperands<OperandSpec> kOperands = {
      .x = reads("x", Touched::kList),
      .e = updates("e", Touched::kFlat),
      .payload = reads("payload", Touched::kArguments, Element::kU8),
      .flags = untouched("flags"),
      .weight = optional(reads("weight", Touched::kOne))};
  static constexpr Division kDivision = Division::kNorms;
};
struct SparseEncode {
  template <class T>
  using Operands = SparseEncodeOperands<T>;
  using Args = SparseArgs;
  using Undo = SparseEncodeUndo;
  static constexpr SparseEncodeOperands<OperandSpec> kOperands = {
      .x = reads("x", Touched::kList),
      .e = updates("e", Touched::kFlat),
      .payload = updates("payload", Touched::kArguments, Element::kU8),
      .flags = raised_flags(),
      .weight = optional(reads("weight", Touched::kOne))};
  static constexpr Division kDivision = Division::kNorms;
};

// Squares of what ranks have sent: of the block with number b = Piece::message + (element of the
// tensor) / (settings' block) and rank r at squares[b * world + r] S(q_j^2), each in float64, as
// the encoder has it; 0 where nothing was sent. Pieces that are sent as float32 have none.
template <class T>
struct SparseSquaresOperands {
  T rows{}, squares{};
};
struct SparseSquares {
  template <class T>
  using Operands = SparseSquaresOperands<T>;
  using Args = SparseArgs;
  static constexpr SparseSquaresOperands<OperandSpec> kOperands = {
      .rows = reads("rows", Touched::kArguments, Element::kU8),
      .squares = updates("squares", Touched::kArguments, Element::kF64)};
  static constexpr Division kDivision = Division::kNorms;
};

// Factors of a range's tensor t, section 7: N_r = fl(sqrt(the squares of rank r in the range's
// blocks, added in float64 from 0 in ascending order)). median: element floor((n - 1) / 2) of the
// ascending N of the n ranks whose weight is not 0. factors[t * world + r] = N_r > median ?
// fl(median / (N_r + 1e-8)), in float64, : 1; ranks that do not count: 1.
template <class T>
struct SparseMedianOperands {
  T squares{}, weights{}, factors{};
};
struct SparseMedian {
  template <class T>
  using Operands = SparseMedianOperands<T>;
  using Args = SparseMedianArgs;
  static constexpr SparseMedianOperands<OperandSpec> kOperands = {
      .squares = reads("squares", Touched::kArguments, Element::kF64),
      .weights = optional(long_as(reads("weights", Touched::kArguments, Element::kU8),
                                  sparse_weights_bytes<SparseMedianArgs>)),
      .factors = updates("factors", Touched::kArguments)};
  static constexpr Division kDivision = Division::kNever;
};

// y = fl(sum * fl(1 / n)). sum: the fl(factor * q) of all ranks whose weight is not 0, added from 0
// in ascending order in groups of 8 ranks, as sum_of_ranks(). n: these ranks, or with kContributors
// those of them that have sent the element; 0: y = 0. Any bytes may be decoded. Of a block whose
// indices are not k ascending ones below m nothing was sent; a level, scale or float32 that is not
// finite counts as 0. rows: payload of rank r at r * row_bytes. weights: float32 of rank r at r *
// weight_bytes; absent: all are 1. factors: of rank r and tensor t at t * world + r; absent, or
// what is sent as float32: 1.
// y: list of float32.
template <class T>
struct SparseMeanOperands {
  T rows{}, weights{}, factors{}, y{};
};
struct SparseMean {
  template <class T>
  using Operands = SparseMeanOperands<T>;
  using Args = SparseArgs;
  static constexpr SparseMeanOperands<OperandSpec> kOperands = {
      .rows = reads("rows", Touched::kArguments, Element::kU8),
      .weights = optional(long_as(reads("weights", Touched::kArguments, Element::kU8),
                                  sparse_weights_bytes<SparseArgs>)),
      .factors = optional(reads("factors", Touched::kArguments)),
      .y = writes("y", Touched::kList)};
  static constexpr Division kDivision = Division::kNorms;
};

}  // namespace kernels
}  // namespace sotto
