#include "core/base/codec.h"

namespace sotto {

std::string_view codec_name(CodecKind kind) {
  switch (kind) {
    case CodecKind::kOnebit: return "onebit";
    case CodecKind::kBf16: return "bf16";
    case CodecKind::kFp16: return "fp16";
    case CodecKind::kInt8: return "int8";
    case CodecKind::kInt4: return "int4";
  }
  return "?";
}

std::string_view scale_name(ScaleKind scale) { return scale == ScaleKind::kL2 ? "l2" : "l1"; }

std::string_view granularity_name(Granularity granularity) {
  switch (granularity) {
    case Granularity::kFlat: return "flat";
    case Granularity::kTensor: return "tensor";
    case Granularity::kBucket: return "bucket";
    case Granularity::kGroup: return "group";
  }
  return "?";
}

}  // namespace sotto
