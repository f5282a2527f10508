// How a kernel is described: what each of its operands is, what the call does with it, and how a
// call may be divided. A description stands beside the contract, in the header of the kernel's
// family; registry.h finds it by KernelId.
//
// A family's header has for each kernel
//
//   template <class T> struct XOperands { T a{}, b{}; };   the operands by name
//   struct X {
//     template <class T> using Operands = XOperands<T>;
//     using Args = ...;                                    arguments, the same at every launch
//     static constexpr XOperands<OperandSpec> kOperands = {.a = reads(...), .b = writes(...)};
//     static constexpr Division kDivision = ...;
//   };
//
// Plan builders fill an XOperands<OperandRef>, kernels read an XOperands<Operand>: the order of the
// members is the order in a call, and nothing else knows it. Shared operands are a member that is
// itself such a struct.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/dtype.h"
#include "core/kernels/call.h"

namespace sotto {

enum class Access : uint8_t {
  kNone = 0,  // not touched
  kRead = 1,
  kWrite = 2,  // what was there before plays no part
  kReadWrite = 3,
};

// Which elements of an operand a call touches.
enum class Touched : uint8_t {
  kOne,          // the first
  kFlat,         // per piece: flat - base ..., `count` of them
  kRows,         // as kFlat, in every row
  kList,         // per piece: tensor piece.tensor, elements piece.offset ...
  kTarget,       // as kList, at piece.target
  kBlocks,       // per piece: one for each norm block that it touches
  kScales,       // per piece: number piece.scale
  kMessages,     // scale messages: what the arguments and Piece::message say
  kGroups,       // per piece or range: number `group`
  kTensors,      // per piece or range: number `tensor`
  kRanges,       // one for each range of the arguments, from the first on
  kRangeBlocks,  // per range: its blocks
  kCounters,     // per piece: number piece.block
  kBytes,        // KernelCall::bytes
  kArguments,    // what the arguments say
};

// What an element is.
enum class Element : uint8_t {
  kByArguments,  // OperandSpec::bits_of
  kBit,
  kU8,
  kU32,
  kU64,
  kF32,
  kF64,
  kTensorState,
  kTensorStep,
  kStateExponents,  // kStateBlocksPerNormBlock bytes
};

struct OperandSpec {
  const char* name = nullptr;
  Access access = Access::kNone;
  Touched touched = Touched::kOne;
  Element element = Element::kF32;
  bool optional = false;
  bool replaced = false;  // what the call writes may lie exactly where this operand lies
  // Where arguments decide; null: they do not.
  uint32_t (*bits_of)(const void* args) = nullptr;   // of an element
  uint64_t (*base_of)(const void* args) = nullptr;   // kFlat: flat index of the first element
  bool (*flat_instead)(const void* args) = nullptr;  // kList, kTarget: flat memory, from base_of on
  uint64_t (*bytes_of)(const void* args) = nullptr;  // kArguments; null: pieces matter too
};

constexpr OperandSpec reads(const char* name, Touched touched, Element element = Element::kF32) {
  return {name, Access::kRead, touched, element};
}
constexpr OperandSpec writes(const char* name, Touched touched, Element element = Element::kF32) {
  return {name, Access::kWrite, touched, element};
}
constexpr OperandSpec updates(const char* name, Touched touched, Element element = Element::kF32) {
  return {name, Access::kReadWrite, touched, element};
}
constexpr OperandSpec untouched(const char* name) {
  return {name, Access::kNone, Touched::kOne, Element::kU8, true};
}
constexpr OperandSpec optional(OperandSpec spec) {
  spec.optional = true;
  return spec;
}
constexpr OperandSpec replaced(OperandSpec spec) {
  spec.replaced = true;
  return spec;
}
constexpr OperandSpec sized(OperandSpec spec, uint32_t (*bits_of)(const void*)) {
  spec.element = Element::kByArguments;
  spec.bits_of = bits_of;
  return spec;
}
constexpr OperandSpec based(OperandSpec spec, uint64_t (*base_of)(const void*)) {
  spec.base_of = base_of;
  return spec;
}
constexpr OperandSpec long_as(OperandSpec spec, uint64_t (*bytes_of)(const void*)) {
  spec.bytes_of = bytes_of;
  return spec;
}
constexpr OperandSpec flat_if(OperandSpec spec, bool (*flat_instead)(const void*)) {
  spec.flat_instead = flat_instead;
  return spec;
}

// Bits of an element whose type is a field of the arguments.
template <class Args, Dtype Args::*kField>
uint32_t dtype_bits(const void* args) {
  return static_cast<uint32_t>(dtype_bytes(static_cast<const Args*>(args)->*kField) * 8);
}
// Gradients and the like: a list of float32, float16 or bfloat16, as Args::source says. 16-bit
// elements are widened, which is exact.
template <class Args>
constexpr OperandSpec source(const char* name) {
  return sized(reads(name, Touched::kList), dtype_bits<Args, &Args::source>);
}
// Operands that many kernels have.
// T: GroupScalars, or what the kernel's family makes of it.
template <class T = GroupScalars>
constexpr OperandSpec group_scalars() {
  return sized(reads("scalars", Touched::kGroups),
               [](const void*) -> uint32_t { return 8 * sizeof(T); });
}
constexpr OperandSpec clip_factor() { return optional(reads("clip", Touched::kOne)); }
constexpr OperandSpec valid_bits() {
  return optional(reads("valid", Touched::kFlat, Element::kBit));
}
constexpr OperandSpec raised_flags() { return updates("flags", Touched::kOne, Element::kU32); }

// How a call may be divided: into several calls, over the threads of a CPU, over thread blocks.
enum class Division : uint8_t {
  kNever,     // one thread block, no pieces
  kBytes,     // Fill: KernelCall::bytes
  kRanges,    // TensorArgs::ranges, each for itself
  kCounters,  // runs of one piece; never into several calls: the block of a piece is a counter
  // Between norm blocks, into calls of any size. Thread blocks take
  kQuads,      // up to kNormBlock elements, padding left out
  kNorms,      // one norm block each, with padding
  kFlatSpace,  // the flat elements between multiples of kNormBlock, with padding
};
// One of the indices of a piece. A kernel names the one that decides where quads begin, that of
// most of its memory (`kAlignment`; without it: flat).
using PieceIndex = uint64_t Piece::*;
// Whether cut_pieces may cut a call.
constexpr bool cuts(Division d) {
  return d == Division::kQuads || d == Division::kNorms || d == Division::kFlatSpace;
}

}  // namespace sotto
