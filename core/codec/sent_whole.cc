#include "core/codec/sent_whole.h"

#include <algorithm>

#include "core/base/text.h"

namespace sotto {

Status check_sent_whole(const CodecSettings& codec, const CompressedLayout& layout,
                        const TensorRun& run, std::span<const float> errors) {
  const uint64_t count = layout.tensors()[run.tensor].count;
  const auto is_zero = [](float e) { return e == 0; };
  if (!codec.row().sparse || !is_dense(codec.sparse, count) || std::ranges::all_of(errors, is_zero))
    return ok_status();
  return invalid_argument(
      "the state has error feedback of tensor {}, whose {} are sent as float32 here (dense_below "
      "{}): it would be lost; import the state in mode reset, or with a dense_below of at most {}",
      run.tensor, counted(count, "element"), codec.sparse.dense_below, count);
}

}  // namespace sotto
