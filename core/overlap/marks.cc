#include "core/overlap/marks.h"

#include <algorithm>

namespace sotto {

RoundMarks::RoundMarks(std::span<const OverlapBucket> buckets, uint64_t tensors)
    : bucket_of_(tensors), marks_(tensors) {
  for (uint32_t b = 0; b < buckets.size(); ++b) {
    for (const uint32_t t : buckets[b].tensors) bucket_of_[t] = b;
    sizes_.push_back(static_cast<uint32_t>(buckets[b].tensors.size()));
  }
  order_.reserve(tensors);
  reset();
}

void RoundMarks::reset() {
  left_ = sizes_;
  std::ranges::fill(marks_, Mark::kMissing);
  missing_ = marks_.size();
  order_.clear();
}

Status RoundMarks::claim(std::span<const uint64_t> indices, uint64_t round) {
  for (size_t i = 0; i < indices.size(); ++i) {
    const uint64_t index = indices[i];
    const bool known = index < marks_.size();
    if (known && marks_[index] == Mark::kMissing) {
      marks_[index] = Mark::kClaimed;
      order_.push_back(static_cast<uint32_t>(index));
      --missing_;
      continue;
    }
    const std::span<const uint64_t> before = indices.first(i);
    give_up(before);
    if (!known)
      return invalid_argument("indices[{}] is {}; allowed: 0 to {}", i, index, marks_.size() - 1);
    if (std::ranges::find(before, index) != before.end())
      return invalid_state("indices[{}]: gradient {} is named twice", i, index);
    return invalid_state("indices[{}]: gradient {} has been marked before in round {}", i, index,
                         round);
  }
  return ok_status();
}

void RoundMarks::give_up(std::span<const uint64_t> indices) {
  for (const uint64_t index : indices) marks_[index] = Mark::kMissing;
  std::erase_if(order_, [&](uint32_t t) { return marks_[t] == Mark::kMissing; });
  missing_ += indices.size();
}

std::optional<uint32_t> RoundMarks::mark(uint64_t index) {
  marks_[index] = Mark::kThere;
  const uint32_t bucket = bucket_of_[index];
  if (--left_[bucket] != 0) return std::nullopt;
  return bucket;
}

std::vector<uint64_t> RoundMarks::missing_ones() const {
  std::vector<uint64_t> out;
  for (uint64_t i = 0; i < marks_.size(); ++i) {
    if (marks_[i] == Mark::kMissing) out.push_back(i);
  }
  return out;
}

}  // namespace sotto
