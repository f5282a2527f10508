// sotto_parts: which part of a tensor goes to which rank.
#pragma once

#include <cstdint>
#include <vector>

#include "capi/src/convert.h"

namespace sotto::capi {

// Checks n structs against the buffers and fills in_parts, out_parts and in_place of the request of
// an all-to-all. In place: the same memory, and the same parts on both sides.
Status take_parts(const sotto_parts* parts, std::span<const Buffer> in, std::span<const Buffer> out,
                  CollectiveRequest* request);

}  // namespace sotto::capi
