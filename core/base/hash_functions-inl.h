// The functions of hash_functions.h, under the name that the including file gives
// (SOTTO_HASH_FUNCTIONS).
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/base/hash_functions.h"

namespace sotto {
namespace {

XXH3_state_t* state_at(void* state) { return static_cast<XXH3_state_t*>(state); }

}  // namespace

extern const HashFunctions SOTTO_HASH_FUNCTIONS{
    [](const void* data, size_t bytes, uint64_t seed) {
      return static_cast<uint64_t>(XXH3_64bits_withSeed(data, bytes, seed));
    },
    [](void* state) { XXH3_64bits_reset(state_at(state)); },
    [](void* state, const void* data, size_t bytes) {
      XXH3_64bits_update(state_at(state), data, bytes);
    },
    [](const void* state) {
      return static_cast<uint64_t>(XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state)));
    }};

static_assert(sizeof(XXH3_state_t) <= 576 && alignof(XXH3_state_t) <= 64);

}  // namespace sotto
