// Error feedback of an overlap as a blob.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/overlap/overlap.h"
#include "core/state/optim_state.h"

namespace sotto {

// kExact, kReset or kMean; kMean is a collective of the overlap's comm, and equal on all ranks.
Result<std::vector<std::byte>> export_state(const Overlap& overlap, StateMode mode);
Result<uint64_t> mean_state_bytes(const Overlap& overlap);
// INVALID_ARGUMENT or UNSUPPORTED on any blob that export_state cannot have made.
Status import_state(Overlap& overlap, StateMode mode, std::span<const std::byte> bytes);

}  // namespace sotto
