#include "core/base/hash.h"

#include "core/base/hash_functions.h"

namespace sotto {
namespace {

// All instruction sets give the same hash.
const HashFunctions& functions() {
  static const HashFunctions& best = __builtin_cpu_supports("avx2") ? kHashAvx2 : kHashBaseline;
  return best;
}

}  // namespace

uint64_t hash64(const void* data, size_t bytes, uint64_t seed) {
  return functions().hash(data, bytes, seed);
}

Hasher64::Hasher64() { reset(); }
void Hasher64::reset() { functions().reset(state_); }
void Hasher64::update(const void* data, size_t bytes) { functions().update(state_, data, bytes); }
uint64_t Hasher64::digest() const { return functions().digest(state_); }

}  // namespace sotto
