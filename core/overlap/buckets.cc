#include "core/overlap/buckets.h"

#include <algorithm>
#include <numeric>

namespace sotto {

std::vector<uint32_t> launch_order(uint64_t tensors, OverlapOrder order) {
  std::vector<uint32_t> out(tensors);
  std::iota(out.begin(), out.end(), 0u);
  if (order != OverlapOrder::kRegistered) std::ranges::reverse(out);
  return out;
}

std::vector<OverlapBucket> cut_buckets(std::span<const OverlapTensor> tensors,
                                       std::span<const uint32_t> order,
                                       const OverlapConfig& config) {
  std::vector<OverlapBucket> buckets;
  bool open = false;
  for (const uint32_t t : order) {
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

Result<std::vector<OverlapBucket>> buckets_of(std::span<const OverlapTensor> tensors,
                                              std::span<const std::vector<uint32_t>> lists) {
  std::vector<OverlapBucket> buckets;
  std::vector<uint32_t> all;
  for (const std::vector<uint32_t>& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
    buckets.push_back({list, 0});
  }
  const std::vector<uint32_t> wanted = launch_order(tensors.size(), OverlapOrder::kRegistered);
  std::ranges::sort(all);
  if (all != wanted || std::ranges::any_of(lists, &std::vector<uint32_t>::empty))
    return invalid_argument("the state's buckets do not have each of {} gradients once",
                            tensors.size());
  for (OverlapBucket& bucket : buckets) {
    for (const uint32_t t : bucket.tensors) bucket.bytes += tensors[t].bytes();
  }
  return buckets;
}

}  // namespace sotto
