#include "core/overlap/places.h"

#include <algorithm>
#include <iterator>

namespace sotto {

Status RoundPlaces::take(std::span<const uint64_t> indices, std::span<void* const> memory,
                         std::span<const OverlapTensor> tensors) {
  for (size_t i = 0; i < indices.size(); ++i) {
    const uint64_t bytes = tensors[indices[i]].bytes();
    if (bytes == 0) continue;
    const auto begin = reinterpret_cast<uintptr_t>(memory[i]), end = begin + bytes;
    const auto next = taken_.lower_bound(begin);
    auto there = taken_.end();
    if (next != taken_.end() && next->first < end) there = next;
    if (next != taken_.begin() && std::prev(next)->second.end > begin) there = std::prev(next);
    if (there == taken_.end()) {
      taken_.emplace_hint(next, begin, Taken{end, indices[i]});
      continue;
    }
    const uint64_t other = there->second.gradient;
    give_back(indices.first(i));
    return invalid_argument(
        "gradient {} lies in memory of gradient {}, {} bytes at {}: a round averages in place, so "
        "none may share memory with another before it has ended",
        indices[i], other, bytes, memory[i]);
  }
  return ok_status();
}

void RoundPlaces::give_back(std::span<const uint64_t> indices) {
  std::erase_if(taken_, [&](const auto& place) {
    return std::ranges::find(indices, place.second.gradient) != indices.end();
  });
}

}  // namespace sotto
