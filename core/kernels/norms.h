// Norms of gradients, clipping, counts of elements that take part.
#pragma once

#include "core/kernels/schema.h"

namespace sotto {

struct SourceArgs {
  Dtype source = Dtype::kF32;
};
struct BlocksArgs {
  uint64_t blocks;
};
struct ClipArgs {
  double clip;
  uint32_t world;
  uint32_t fail_word;
};

// The message of NormMessage: double norm; uint32 flags; uint32 0.
inline constexpr uint64_t kNormMessageBytes = 16;

namespace kernels {

inline uint64_t block_sum_bytes(const void* args) {
  return static_cast<const BlocksArgs*>(args)->blocks * 4;
}
inline uint64_t norm_message_bytes(const void*) { return kNormMessageBytes; }
inline uint64_t norm_messages_bytes(const void* args) {
  return static_cast<const ClipArgs*>(args)->world * kNormMessageBytes;
}

// Block sums of x*x.
template <class T>
struct SumSquaresOperands {
  T x{}, sums{};
};
struct SumSquares {
  template <class T>
  using Operands = SumSquaresOperands<T>;
  using Args = SourceArgs;
  static constexpr SumSquaresOperands<OperandSpec> kOperands = {
      .x = source<SourceArgs>("x"), .sums = writes("sums", Touched::kBlocks)};
  static constexpr Division kDivision = Division::kNorms;
};

// Norm of this rank's gradient: norm = sqrt(float64 sum of all blocks); flags |= kFlagNonfinite if
// norm is not finite.
template <class T>
struct NormMessageOperands {
  T sums{}, flags{}, message{};
};
struct NormMessage {
  template <class T>
  using Operands = NormMessageOperands<T>;
  using Args = BlocksArgs;
  static constexpr NormMessageOperands<OperandSpec> kOperands = {
      .sums = long_as(reads("sums", Touched::kArguments), block_sum_bytes),
      .flags = optional(reads("flags", Touched::kOne, Element::kU32)),
      .message = long_as(writes("message", Touched::kArguments, Element::kU8), norm_message_bytes)};
  static constexpr Division kDivision = Division::kNever;
};

// norm = mean of the norms of `world` messages (added in rank order, then divided), times unscale;
// coefficient = (clip / (norm + 1e-6) if that is < 1 else 1; clip = 0: 1) times unscale, rounded to
// float32 once. word = prior not kCommit ? prior : (any flag ? fail_word : kCommit).
// norm, unscale: doubles. Without unscale: 1; without prior: kCommit.
template <class T>
struct ClipCoefficientOperands {
  T messages{}, coefficient{}, norm{}, word{}, unscale{}, prior{};
};
struct ClipCoefficient {
  template <class T>
  using Operands = ClipCoefficientOperands<T>;
  using Args = ClipArgs;
  static constexpr ClipCoefficientOperands<OperandSpec> kOperands = {
      .messages =
          long_as(reads("messages", Touched::kArguments, Element::kU8), norm_messages_bytes),
      .coefficient = writes("coefficient", Touched::kOne),
      .norm = writes("norm", Touched::kOne, Element::kF64),
      .word = writes("word", Touched::kOne, Element::kU32),
      .unscale = optional(reads("unscale", Touched::kOne, Element::kF64)),
      .prior = optional(reads("prior", Touched::kOne, Element::kU32))};
  static constexpr Division kDivision = Division::kNever;
};

// counts[i] += valid elements of pieces with `block` == i. valid absent: all. counts: uint64, zero
// before.
template <class T>
struct CountValidOperands {
  T valid{}, counts{};
};
struct CountValid {
  template <class T>
  using Operands = CountValidOperands<T>;
  using Args = NoArgs;
  static constexpr CountValidOperands<OperandSpec> kOperands = {
      .valid = valid_bits(), .counts = updates("counts", Touched::kCounters, Element::kU64)};
  static constexpr Division kDivision = Division::kCounters;
};

}  // namespace kernels
}  // namespace sotto
