#include "core/cpu/simd_tables.h"

namespace sotto {

const KernelTable* sse4_kernels() { return nullptr; }
const KernelTable* avx2_kernels() { return nullptr; }
const KernelTable* avx512_kernels() { return nullptr; }

}  // namespace sotto
