// Kernel tables of the vector targets. nullptr: this build has no such target.
#pragma once

#include "core/cpu/kernel_table.h"

namespace sotto {

const KernelTable* sse4_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();

}  // namespace sotto
