#define XXH_INLINE_ALL
#include "core/base/hash.h"

#include <xxhash.h>

namespace sotto {

static_assert(sizeof(XXH3_state_t) <= 576 && alignof(XXH3_state_t) <= 64);

uint64_t hash64(const void* data, size_t bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(data, bytes, seed);
}

Hasher64::Hasher64() { reset(); }
Hasher64::~Hasher64() = default;
void Hasher64::reset() { XXH3_64bits_reset(reinterpret_cast<XXH3_state_t*>(state_)); }
void Hasher64::update(const void* data, size_t bytes) {
  XXH3_64bits_update(reinterpret_cast<XXH3_state_t*>(state_), data, bytes);
}
uint64_t Hasher64::digest() const {
  return XXH3_64bits_digest(reinterpret_cast<const XXH3_state_t*>(state_));
}

}  // namespace sotto
