// Equal shares, as far as they are whole.
#pragma once

#include <cstdint>

namespace sotto {

// Where the share of `part` of `parts` begins: floor(total * part / parts), without overflow.
constexpr uint64_t share_begin(uint64_t total, uint64_t part, uint64_t parts) {
  return total / parts * part + total % parts * part / parts;
}

}  // namespace sotto
