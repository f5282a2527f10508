// sotto_parts: which part of a tensor goes to which rank.
#pragma once

#include <cstdint>
#include <vector>

#include "capi/src/convert.h"

namespace sotto::capi {

// Checks the structs against the buffers and fills in_parts, out_parts and in_place of the request.
// kAllToAllParts has both sides; in place: the same memory, and the same parts on both.
// kAllGatherParts has parts in `out`, kReduceScatterParts in `in`, and the other buffer is this
// rank's; in place: it lies there.
Status take_parts(const sotto_parts* parts, std::span<const Buffer> in, std::span<const Buffer> out,
                  CollectiveRequest* request);

// Per tensor the elements of all parts; 0 for an all-to-all, where ranks have different numbers.
SmallVector<uint64_t> counts_of_parts(const CollectiveRequest& request);

}  // namespace sotto::capi
