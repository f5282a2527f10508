// Tensors that a sparse codec sends as float32. Its kernels neither read nor write an error of
// theirs, so what a state says of one would never be sent.
#pragma once

#include <span>

#include "core/base/codec.h"
#include "core/base/status.h"
#include "core/codec/tensor_runs.h"

namespace sotto {

// INVALID_ARGUMENT: the run is of such a tensor and has an error. errors: those of a state, for the
// elements of the run.
Status check_sent_whole(const CodecSettings& codec, const CompressedLayout& layout,
                        const TensorRun& run, std::span<const float> errors);

}  // namespace sotto
