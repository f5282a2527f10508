// Tensors that a sparse codec sends as float32. Its kernels neither read nor write an error of
// theirs, so what a state says of one would never be sent.
#pragma once

#include <cstdint>
#include <span>

#include "core/base/codec.h"
#include "core/base/status.h"

namespace sotto {

// INVALID_ARGUMENT: the tensor, which has so many elements, is one and has an error. errors: those
// of a state, for some of the elements.
Status check_sent_whole(const CodecSettings& codec, uint64_t tensor, uint64_t elements,
                        std::span<const float> errors);

}  // namespace sotto
