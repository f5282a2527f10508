// Reads the settings of overlaps.
#pragma once

#include <string_view>

#include "core/config/config.h"

namespace sotto {

// json: what sotto_overlap_create documents. INVALID_ARGUMENT names the key
// ("overlap.bucket_bytes"), what was found and what is allowed.
Result<OverlapConfig> parse_overlap(std::string_view json);
// The same of rounds that are steps of an optimizer with this configuration, which says what is on
// the wire and, of 1-bit types with buckets, how large these are.
Result<OverlapConfig> parse_step_overlap(std::string_view json, const Config& optimizer);

}  // namespace sotto
