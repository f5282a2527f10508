// What is known about each kernel, by its number.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/kernels/families.h"

namespace sotto {

struct KernelSpec {
  const char* name = "unknown";
  std::span<const OperandSpec> operands;
  Division division = Division::kNever;
  PieceIndex alignment = &Piece::flat;
  KernelId undo = KernelId::kCount;  // the kernel that takes a call back; kCount: none is needed
  // The ranges in the arguments; null: there are none.
  std::span<const NormRange> (*ranges)(const void* args) = nullptr;
};

// KernelId::kCount and what is beyond: no operands, "unknown".
const KernelSpec& kernel_spec(KernelId id);

inline const char* kernel_name(KernelId id) { return kernel_spec(id).name; }

// Whether cut_pieces may cut a call of this kernel.
inline bool kernel_cuts(KernelId id) { return cuts(kernel_spec(id).division); }

// Operands of a call with these arguments that are arrays of tensor pointers: bit k for operand k.
uint32_t list_operands(KernelId id, const void* args);

// Bytes that a call touches of an operand.
struct TouchedBytes {
  uint32_t tensor = kNoTensor;  // lists: of which tensor; else kNoTensor
  uint64_t offset = 0;          // from the operand (or the tensor's pointer) on
  uint64_t bytes = 0;
};
// Appends them. False if the description does not say them all: rows, and payloads of blocks.
bool touched_bytes(const KernelCall& call, size_t operand, std::vector<TouchedBytes>* out);

// The number of a kernel.
template <class K>
inline constexpr KernelId kKernelId = KernelId::kCount;
#define SOTTO_KERNEL(type, function, family) \
  template <>                                \
  inline constexpr KernelId kKernelId<kernels::type> = KernelId::k##type;
#include "core/kernels/kernels.def"

// A call of K whose operands outlive it, without pieces and arguments.
template <class K>
KernelCall call_of(const typename K::template Operands<Operand>& operands);

// How many operands it has.
template <class K>
inline constexpr size_t kOperandCount = sizeof(typename K::template Operands<Operand>) /
                                        sizeof(Operand);

template <class K>
KernelCall call_of(const typename K::template Operands<Operand>& operands) {
  KernelCall call;
  call.id = kKernelId<K>;
  call.operands = {reinterpret_cast<const Operand*>(&operands), kOperandCount<K>};
  return call;
}

}  // namespace sotto
