// The description of a codec.
#pragma once

#include <string_view>

#include "core/group/onebit_state.h"

namespace sotto {

// json: what sotto_codec_create documents. rank and size are left as they are.
// INVALID_ARGUMENT names the key, what was found and what is allowed.
Result<OnebitSettings> parse_codec(std::string_view json);

// "onebit", "bf16", ...
std::string_view codec_name(CodecKind kind);

}  // namespace sotto
