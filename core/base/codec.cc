#include "core/base/codec.h"

#include <algorithm>
#include <iterator>

namespace sotto {
namespace {

const CodecRow* find_row(CodecKind kind) {
  const auto* row = std::ranges::find(kCodecs, kind, &CodecRow::kind);
  return row == std::end(kCodecs) ? nullptr : row;
}

}  // namespace

const CodecRow& codec_row(CodecKind kind) { return *find_row(kind); }

std::string_view codec_name(CodecKind kind) {
  const CodecRow* row = find_row(kind);
  return row == nullptr ? "?" : row->name();
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
