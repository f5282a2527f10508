// Element types and reductions of the fake NCCL.
#pragma once

#include <nccl.h>

#include <cstddef>

namespace sotto::fake_nccl {

// 0: not a type.
size_t type_bytes(ncclDataType_t type);
// to[i] = op(to[i], from[i]), rounded to the type after each; sums for ncclAvg. False: no such
// reduction.
bool reduce_into(void* to, const void* from, size_t n, ncclDataType_t type, ncclRedOp_t op);
// to[i] /= ranks.
void divide(void* to, size_t n, ncclDataType_t type, int ranks);

}  // namespace sotto::fake_nccl
