// Element types, reductions and exchanges of the fake NCCL.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/emulation/nccl/comm.h"

namespace sotto::fake_nccl {

// 0: not a type.
size_t type_bytes(ncclDataType_t type);
// to[i] = op(to[i], from[i]), rounded to the type after each; sums for ncclAvg. False: no such
// reduction.
bool reduce_into(void* to, const void* from, size_t n, ncclDataType_t type, ncclRedOp_t op);
// to[i] /= ranks.
void divide(void* to, size_t n, ncclDataType_t type, int ranks);

// The part of a rank.
inline char* part(void* at, size_t bytes, int index) {
  return static_cast<char*>(at) + bytes * static_cast<size_t>(index);
}
inline const char* part(const void* at, size_t bytes, int index) {
  return static_cast<const char*>(at) + bytes * static_cast<size_t>(index);
}
// What every rank holds of a range, reduced in the order of ranks. `mine`: this rank's part.
ncclResult_t reduce_in_order(Comm& c, uint32_t code, const void* mine, std::vector<char>* sum,
                             size_t n, ncclDataType_t type, ncclRedOp_t op);
// All of `data`, or to each rank its part.
ncclResult_t send_to_all(Comm& c, uint32_t code, const void* data, size_t bytes, bool parts);

}  // namespace sotto::fake_nccl
