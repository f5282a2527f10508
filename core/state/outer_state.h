// State of an outer optimizer as a blob.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/base/status.h"
#include "core/outer/outer.h"

namespace sotto {

// Everything that this rank has, live parameters included: continues bit for bit on the same ranks.
std::vector<std::byte> encode_outer(const OuterSnapshot& snapshot);
// INVALID_ARGUMENT or UNSUPPORTED on any blob that encode_outer cannot have made; never reads out
// of bounds.
Result<OuterSnapshot> decode_outer(std::span<const std::byte> bytes);

}  // namespace sotto
