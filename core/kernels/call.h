// A kernel call: what every computation that a plan may contain is given. The kernels themselves
// are listed in kernels.def; the header of a kernel's family has its contract (operands, arguments
// and exact arithmetic) and its description (schema.h). A device supplies the kernels (core/cpu for
// the CPU); builders and optimizers are written once, as sequences of these, and do not ask which
// device runs them.
//
// Rules for all kernels:
//  - Elements are computed in float32, with one rounding per written operation, no fused
//    multiply-add, and subnormals kept. The order of operations is the one written in the contract;
//    every device, SIMD target, thread count and segment size gives the same bits.
//  - sgn(x) = +1 if x >= 0 else -1 (so -0 is +). Bits are packed most significant first: element i
//    of a bit array is byte i / 8, bit 7 - i % 8. Bit 1 means +scale.
//  - Bulk kernels work on pieces (below). Distinct pieces of one call never overlap in their
//    outputs, are sorted by `block` where block sums are made, and a norm block never spans two
//    calls. A call may therefore be cut between norm blocks, over threads or into several calls,
//    without changing a bit.
//  - Norms: blocks of kNormBlock elements; inside a block, lane (position % 64) adds fl(x*x) (l1:
//    |x|) in float32 in ascending position; lanes are folded by halves 32, 16, .. 1 (lane j += lane
//    j + h); the block's sum is a float32. Blocks are then added in float64 in ascending order.
//    Elements that take no part (masked, padding) add nothing; every block that a piece touches, a
//    padding piece too, gets its sum (or maximum), so the arrays have room for all of them.
//  - Where a kernel writes bits, norm blocks start at multiples of 8 bits (chunks do): calls and
//    threads share no byte.
//  - The sign and payload of a NaN are not specified, except in results of kReduce.
//  - A kernel with a predicate runs only if *predicate == expect when the device reaches it.
//  - "list" operands are arrays of pointers, one per tensor, indexed by Piece::tensor. "flat"
//    operands are contiguous and indexed by Piece::flat minus the base given in the arguments. An
//    optional operand may be null.
//  - "source" operands are lists of float32, float16 or bfloat16, as `source` in the arguments
//    says. Elements of 16 bits are widened, which is exact; then everything is float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/codec.h"
#include "core/base/dtype.h"
#include "core/base/host_device.h"
#include "core/base/low_precision_state.h"

namespace sotto {

inline constexpr uint64_t kNormBlock = 8192;  // elements
inline constexpr uint64_t kNormLanes = 64;
inline constexpr uint32_t kNoTensor = 0xffffffffu;
inline constexpr uint64_t kStateBlocksPerNormBlock = kNormBlock / kStateBlock;

enum class ReduceOp : uint8_t { kSum = 1, kMean = 2, kMin = 3, kMax = 4, kProd = 5, kBitOr = 6 };

// A run of consecutive elements of one tensor, inside one chunk of one compression instance.
struct Piece {
  uint64_t flat = 0;    // index of the first element in the flat space of the buffer
  uint64_t offset = 0;  // index of the first element in its tensor
  // Index in the output tensor; differs from offset in reduce-scatter and all-gather only.
  uint64_t target = 0;
  uint64_t count = 0;  // elements
  uint64_t block = 0;  // norm block of the first element: index into the array of block sums
  uint32_t lane = 0;   // position of the first element in that block, 0 .. kNormBlock - 1
  // Index into list operands; kNoTensor: padding (bits become 1, nothing else is touched).
  uint32_t tensor = 0;
  uint32_t scale = 0;  // compression instance: index of the worker scale and the server scale
  uint32_t chunk = 0;  // server that owns the elements
  uint32_t group = 0;  // parameter group: index into GroupScalars
  // Where the scale of the elements stands: for a server the index in one message of its section,
  // else the index in the message area, of the scale that `chunk` sends.
  uint32_t message = 0;
};

// A scale message, one per rank: float32 scale of every instance of a section, then one uint32 of
// flags. The messages of all ranks lie one after the other; those of all sections are the message
// area.
inline constexpr uint32_t kFlagNonfinite = 1;
constexpr uint64_t scale_message_bytes(uint64_t instances) { return 4 * instances + 4; }

// Numbers of one parameter group in one step; written by the host before the step starts, read by
// kernels. A family whose kernels need more derives from it; an operand is an array of one type.
struct GroupScalars {
  double lr = 0;  // learning rate of this step
  float b1 = 0, one_minus_b1 = 0, b2 = 0, one_minus_b2 = 0;
  float eps = 0;
  float weight_decay = 0;  // 0: none
};

// Per-tensor numbers of 1-bit LAMB that live across steps.
struct TensorState {
  double c_avg = 0;  // moving average of the trust ratio
  double last_factor = 1;
  double scaling_coeff = 1;
};

// Per-tensor numbers of one step: written by the scalar kernels, read by the update and by reports.
struct TensorStep {
  float step_size = 0;  // what the update is multiplied with
  uint32_t reserved = 0;
  double trust_ratio = 0;  // LAMB: clamped ratio; 1-bit LAMB compressed: c_avg * factor
  double factor = 1;       // 1-bit LAMB compressed
};

// A norm over a range of blocks: of an instance, of a server's chunk of it, or of a tensor.
struct NormRange {
  uint64_t first_block = 0;
  uint64_t blocks = 0;
  uint64_t count = 0;   // elements when nothing is masked
  uint32_t group = 0;   // per-tensor ranges: parameter group
  uint32_t tensor = 0;  // per-tensor ranges: index into TensorState and TensorStep
};

// Number of a kernel; `kAdam` is kernels::Adam.
enum class KernelId : uint16_t {
#define SOTTO_KERNEL(type, function, family) k##type,
#include "core/kernels/kernels.def"
  kCount,
};

// Words of kGate and kClipCoefficient; also values of predicates.
inline constexpr uint32_t kCommit = 1;  // every rank commits
// Nothing is written: a worker met a value that is not finite; a server met a sum that is not
// finite, and server residuals become 0; messages may not have arrived.
inline constexpr uint32_t kSkipNonfinite = 2;
inline constexpr uint32_t kSkipServer = 3;
inline constexpr uint32_t kSkipAborted = 4;

struct NoArgs {};  // of kernels without arguments

// A bound operand: flat memory, or (list) an array of tensor pointers, in memory that the device
// reads.
struct Operand {
  void* data = nullptr;
  template <class T>
  SOTTO_HOST_DEVICE T* flat() const {
    return static_cast<T*>(data);
  }
  template <class T>
  SOTTO_HOST_DEVICE T* list(uint32_t tensor) const {
    return static_cast<T*>(static_cast<void* const*>(data)[tensor]);
  }
};

// Operands of kernel K, in the order of a call, by name.
template <class K>
SOTTO_HOST_DEVICE const typename K::template Operands<Operand>& named(const Operand* operands) {
  static_assert(sizeof(typename K::template Operands<Operand>) % sizeof(Operand) == 0);
  return *reinterpret_cast<const typename K::template Operands<Operand>*>(operands);
}

class CallTables;  // device.h

struct KernelCall {
  // Constant: the same at every launch of a step.
  KernelId id = KernelId::kFill;
  std::span<const Piece> pieces;
  const void* args = nullptr;  // the Args of the kernel
  uint64_t bytes = 0;          // kFill
  // Of one launch.
  std::span<const Operand> operands;
  const uint32_t* predicate = nullptr;
  uint32_t expect = 0;
  bool paired_ran = false;  // undo kernels only
  // Where the device has the constant part, if it has made tables of it.
  const CallTables* tables = nullptr;
  uint32_t call = 0;

  template <class T>
  const T& arguments() const {
    return *static_cast<const T*>(args);
  }
  // The operands of a call of K.
  template <class K>
  const typename K::template Operands<Operand>& of() const {
    return named<K>(operands.data());
  }
};

}  // namespace sotto
