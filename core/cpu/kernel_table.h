// Tables of CPU kernels: one per SIMD target, all with equal results. A table has an entry for
// every KernelId.
#pragma once

#include <array>
#include <cstddef>

#include "core/kernels/families.h"

namespace sotto {

// Executes a call whose predicate has been checked already. Never fails: operands and arguments are
// the engine's.
using KernelFunction = void (*)(const KernelCall&);

using KernelTable = std::array<KernelFunction, static_cast<size_t>(KernelId::kCount)>;

inline KernelFunction& kernel_entry(KernelTable& table, KernelId id) {
  return table[static_cast<size_t>(id)];
}

// The reference: plain loops in the order that the contracts state.
const KernelTable& scalar_kernels();

// The parts it is made of.
namespace scalar {
#define SOTTO_KERNEL(type, function, family) void function(const KernelCall& call);
#include "core/kernels/kernels.def"
}  // namespace scalar

}  // namespace sotto
