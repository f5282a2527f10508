// Makes of a kernel call what is launched (cuda/kernels/kernels.h). The host's side: needs no CUDA
// compiler.
#pragma once

#include "core/base/status.h"
#include "cuda/kernels/kernels.h"

namespace sotto::cuda {

// Pure: reads id, pieces, args and bytes of the call, neither operands nor memory, and calls
// nothing of CUDA. An error if the call cannot be described: more than 2^32 - 1 pieces or 2^31 - 1
// thread blocks, or pieces with block sums that are not in ascending order.
Result<PreparedKernel> prepare(const KernelCall& call);

}  // namespace sotto::cuda
