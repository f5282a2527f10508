// XXH3 compiled for one instruction set: hash_baseline.cc, hash_avx2.cc. No header of the standard
// library here or there: its inline functions would be compiled for that set too, and might be used
// where the processor has it not.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace sotto {

struct HashFunctions {
  uint64_t (*hash)(const void* data, size_t bytes, uint64_t seed);
  void (*reset)(void* state);
  void (*update)(void* state, const void* data, size_t bytes);
  uint64_t (*digest)(const void* state);
};

extern const HashFunctions kHashBaseline;
extern const HashFunctions kHashAvx2;

}  // namespace sotto
