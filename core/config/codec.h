// The description of a codec: a JSON object, for sotto_codec_create and for sotto.gradient_codec.
#pragma once

#include <string_view>

#include "core/base/codec.h"
#include "core/base/status.h"

namespace sotto {

// json: what sotto_codec_create documents. INVALID_ARGUMENT names the key ("codec.block"), what was
// found and what is allowed.
Result<CodecSettings> parse_codec(std::string_view json);

}  // namespace sotto
