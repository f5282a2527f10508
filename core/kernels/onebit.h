// The 1-bit codec with error feedback (specification of the 1-bit optimizers, section 1; 1-bit
// Adam, arXiv 2102.02888): encoder, server, decoder and their scales. Decisions over messages,
// which every codec has, are here too.
//
// Residuals are deferred: c holds what was encoded, old_scales the scales it was encoded with, so
// that the residual is e = c - (c >= 0 ? S_old : -S_old).
#pragma once

#include "core/base/codec.h"
#include "core/kernels/schema.h"

namespace sotto {

struct EncodeArgs {
  uint64_t bits_base;  // flat index of bit 0 of `bits`
  ScaleKind scale;
  bool identity;
  Dtype source = Dtype::kF32;
};
struct NormArgs {
  const NormRange* ranges;  // owned by the plan; one per instance
  uint64_t n;
  ScaleKind scale;
};
struct ServerArgs {
  uint64_t row_bytes;
  uint64_t valid_base;
  uint64_t instances;
  uint32_t world;
  ScaleKind scale;
};
struct GateArgs {
  uint64_t message_bytes;  // of one message; the flags are its last 4 bytes
  uint32_t world;
  uint32_t fail_word;
  const uint64_t* sections = nullptr;  // owned by the plan: message_bytes of every section
  uint64_t n_sections = 0;             // 0: one, of message_bytes
};

namespace kernels {

// What every 1-bit encoder writes: c (flat), the scales that c was encoded with (float32 per
// instance), bits (bit piece.flat - bits_base), block sums (float32), flags. valid: flat bits.
template <class T>
struct EncoderOperands {
  T c{}, old_scales{}, bits{}, sums{}, valid{}, flags{};
};
inline uint64_t bits_base(const void* args) {
  return static_cast<const EncodeArgs*>(args)->bits_base;
}
// identity: nothing is encoded, and c, written blindly, is the result.
inline constexpr EncoderOperands<OperandSpec> kEncoder = {
    .c = updates("c", Touched::kFlat),
    .old_scales = optional(reads("old_scales", Touched::kScales)),
    .bits = optional(based(writes("bits", Touched::kFlat, Element::kBit), bits_base)),
    .sums = optional(writes("sums", Touched::kBlocks)),
    .valid = valid_bits(),
    .flags = raised_flags()};
inline constexpr EncoderOperands<OperandSpec> kEncoderUndo = {
    .c = updates("c", Touched::kFlat),
    .old_scales = reads("old_scales", Touched::kScales),
    .bits = untouched("bits"),
    .sums = untouched("sums"),
    .valid = valid_bits(),
    .flags = untouched("flags")};

// Encoder (section 1.1 steps 1-4).
//   x' = isfinite(x) ? x : 0 (and flags |= kFlagNonfinite);  e = c - (c >= 0 ? S_old : -S_old);
//   c = x' + e;  bit = c >= 0;  block sum += c*c (l1: |c|).
// Masked: c = 0, bit 1. Padding: bit 1. coefficient: float32, x counts times it.
template <class T>
struct OnebitEncodeOperands {
  T x{};
  EncoderOperands<T> to{};
  T coefficient{};
};
// Takes an encoding back. call.paired_ran (this range was encoded): c = isfinite(c) ? c - x' : 0,
// else c = e as above, and the result does not depend on x, which a device does not read then: the
// caller's stream may not have written it yet. Masked: c = 0.
struct OnebitEncodeUndo {
  template <class T>
  using Operands = OnebitEncodeOperands<T>;
  using Args = EncodeArgs;
  static constexpr OnebitEncodeOperands<OperandSpec> kOperands = {
      .x = source<EncodeArgs>("x"),
      .to = kEncoderUndo,
      .coefficient = optional(reads("coefficient", Touched::kOne))};
  static constexpr Division kDivision = Division::kQuads;
};
struct OnebitEncode {
  template <class T>
  using Operands = OnebitEncodeOperands<T>;
  using Args = EncodeArgs;
  using Undo = OnebitEncodeUndo;
  static constexpr OnebitEncodeOperands<OperandSpec> kOperands = {
      .x = source<EncodeArgs>("x"),
      .to = kEncoder,
      .coefficient = optional(reads("coefficient", Touched::kOne))};
  static constexpr Division kDivision = Division::kNorms;
};

// Server (section 1.1 steps 5-8, order of 1.6).
//   t_r = fl(S_r * fl(1/W));  a = sum of +-t_r in groups of 8 ranks;
//   a = a + (c - (c >= 0 ? R_old : -R_old));  new_c = a;  bit = a >= 0;  block sum += a*a (l1:
//   |a|).
// Masked: new_c = 0, bit 1. Piece::flat counts from the start of this rank's chunk.
// rows: row r of bits at r * row_bytes. messages: of all ranks, for the section. valid: bit
// piece.flat + valid_base. new_c may be c.
template <class T>
struct OnebitServerOperands {
  T rows{}, messages{}, c{}, old_scales{}, bits{}, sums{}, valid{}, new_c{};
};
struct OnebitServer {
  template <class T>
  using Operands = OnebitServerOperands<T>;
  using Args = ServerArgs;
  // As kFlat, whose base is subtracted.
  static uint64_t valid_base(const void* args) {
    return uint64_t{0} - static_cast<const ServerArgs*>(args)->valid_base;
  }
  static constexpr OnebitServerOperands<OperandSpec> kOperands = {
      .rows = reads("rows", Touched::kRows, Element::kBit),
      .messages = reads("messages", Touched::kMessages),
      .c = replaced(reads("c", Touched::kFlat)),
      .old_scales = reads("old_scales", Touched::kScales),
      .bits = writes("bits", Touched::kFlat, Element::kBit),
      .sums = writes("sums", Touched::kBlocks),
      .valid = based(valid_bits(), valid_base),
      .new_c = writes("new_c", Touched::kFlat)};
  static constexpr Division kDivision = Division::kNorms;
};

// y = bit ? R : -R, 0 where masked (step 10). R: number `message` of the message area. y: list of
// float32 at `target`.
template <class T>
struct OnebitDecodeOperands {
  T bits{}, messages{}, y{}, valid{};
};
struct OnebitDecode {
  template <class T>
  using Operands = OnebitDecodeOperands<T>;
  using Args = NoArgs;
  static constexpr OnebitDecodeOperands<OperandSpec> kOperands = {
      .bits = reads("bits", Touched::kFlat, Element::kBit),
      .messages = reads("messages", Touched::kMessages),
      .y = writes("y", Touched::kTarget),
      .valid = valid_bits()};
  static constexpr Division kDivision = Division::kQuads;
  static constexpr PieceIndex kAlignment = &Piece::target;
};

// Scales from block sums: l2: float(sqrt(sum / n)), l1: float(sum / n); 0 if n = 0. A scale that is
// not finite raises the flag and is 0 in both outputs. Writes the scales and this rank's scale
// message, with the flags.
// counts: valid elements per range (uint64). scales: float32 per range. Without ranges sums, counts
// and scales may be absent.
template <class T>
struct NormFinishOperands {
  T sums{}, counts{}, scales{}, message{}, flags{};
};
struct NormFinish {
  template <class T>
  using Operands = NormFinishOperands<T>;
  using Args = NormArgs;
  static uint64_t message_bytes(const void* args) {
    return scale_message_bytes(static_cast<const NormArgs*>(args)->n);
  }
  static constexpr NormFinishOperands<OperandSpec> kOperands = {
      .sums = optional(reads("sums", Touched::kRangeBlocks)),
      .counts = optional(reads("counts", Touched::kRanges, Element::kU64)),
      .scales = optional(writes("scales", Touched::kRanges)),
      .message = long_as(writes("message", Touched::kArguments, Element::kU8), message_bytes),
      .flags = raised_flags()};
  static constexpr Division kDivision = Division::kNever;
};

// Decision that all ranks take alike.
//   word = prior == kCommit (or no prior) and no message carries a flag ? kCommit :
//          (prior not kCommit ? prior : fail_word).
// messages: scale messages of all ranks, of one section or (GateArgs::sections) the message area.
template <class T>
struct GateOperands {
  T messages{}, prior{}, word{};
};
struct Gate {
  template <class T>
  using Operands = GateOperands<T>;
  using Args = GateArgs;
  static uint64_t messages_bytes(const void* args) {
    const auto& a = *static_cast<const GateArgs*>(args);
    uint64_t bytes = a.n_sections == 0 ? a.message_bytes : 0;
    for (uint64_t s = 0; s < a.n_sections; ++s) bytes += a.sections[s];
    return a.world * bytes;
  }
  static constexpr GateOperands<OperandSpec> kOperands = {
      .messages = long_as(reads("messages", Touched::kArguments, Element::kU8), messages_bytes),
      .prior = optional(reads("prior", Touched::kOne, Element::kU32)),
      .word = writes("word", Touched::kOne, Element::kU32)};
  static constexpr Division kDivision = Division::kNever;
};

}  // namespace kernels
}  // namespace sotto
