// State of an outer optimizer as a blob.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/base/status.h"
#include "core/optim/snapshot.h"
#include "core/outer/outer.h"

namespace sotto {

// Everything that this rank has, live parameters included: continues bit for bit on the same ranks.
std::vector<std::byte> encode_outer(const OuterSnapshot& snapshot);
// INVALID_ARGUMENT or UNSUPPORTED on any blob that encode_outer cannot have made; never reads out
// of bounds.
Result<OuterSnapshot> decode_outer(std::span<const std::byte> bytes);

// What this rank has now, for itself (kOwn) or for any rank of any number. Waits for averages under
// way. UNSUPPORTED: kMean, of a codec with error feedback.
Result<std::vector<std::byte>> export_outer(Outer& outer, StateErrors errors);

}  // namespace sotto
