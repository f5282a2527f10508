#include "core/overlap/buckets.h"

#include <algorithm>

namespace sotto {

std::vector<OverlapBucket> cut_buckets(std::span<const OverlapTensor> tensors,
                                       const OverlapConfig& config) {
  std::vector<OverlapBucket> buckets;
  bool open = false;
  const auto n = static_cast<uint32_t>(tensors.size());
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t t = config.order == OverlapOrder::kReversed ? n - 1 - i : i;
    if (!open) buckets.emplace_back();
    OverlapBucket& bucket = buckets.back();
    bucket.tensors.push_back(t);
    bucket.bytes += tensors[t].bytes();
    open = bucket.bytes < (buckets.size() == 1 ? config.first_bucket_bytes : config.bucket_bytes);
  }
  for (OverlapBucket& bucket : buckets) {
    std::ranges::stable_sort(bucket.tensors, {}, [&](uint32_t t) { return tensors[t].dtype; });
  }
  return buckets;
}

}  // namespace sotto
