#include "core/codec/sent_whole.h"

#include <algorithm>

#include "core/base/text.h"

namespace sotto {

Status check_sent_whole(const CodecSettings& codec, uint64_t tensor, uint64_t elements,
                        std::span<const float> errors) {
  const auto is_zero = [](float e) { return e == 0; };
  if (!codec.row().sparse || !is_dense(codec.sparse, elements) ||
      std::ranges::all_of(errors, is_zero))
    return ok_status();
  return invalid_argument(
      "the state has error feedback of tensor {}, whose {} are sent as float32 here (dense_below "
      "{}): it would be lost; import the state in mode reset, or with a dense_below of at most {}",
      tensor, counted(elements, "element"), codec.sparse.dense_below, elements);
}

}  // namespace sotto
