#include "core/base/codec.h"

#include <algorithm>
#include <bit>
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

std::string_view sparse_index_name(SparseIndex index) {
  return index == SparseIndex::kEliasFano ? "ef" : "packed";
}
std::string_view sparse_average_name(SparseAverage average) {
  return average == SparseAverage::kRanks ? "ranks" : "contributors";
}
std::string_view sparse_exchange_name(SparseExchange exchange) {
  return exchange == SparseExchange::kGather ? "gather" : "two_phase";
}

std::array<uint64_t, 19> CodecSettings::terms() const {
  return {static_cast<uint64_t>(kind),
          chunk_align,
          static_cast<uint64_t>(granularity),
          bucket_elements,
          static_cast<uint64_t>(scale),
          block,
          residual,
          compat,
          sparse.block,
          sparse.k,
          sparse.bits,
          static_cast<uint64_t>(sparse.index),
          static_cast<uint64_t>(sparse.average),
          std::bit_cast<uint64_t>(sparse.error_decay),
          sparse.dense_below,
          sparse.median_clip,
          static_cast<uint64_t>(sparse.exchange),
          sparse.k_server,
          static_cast<uint64_t>(hierarchy)};
}

}  // namespace sotto
