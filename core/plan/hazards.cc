#include "core/plan/hazards.h"

namespace sotto {

void Hazards::split_at(Ranges& ranges, uint64_t position) {
  auto it = ranges.upper_bound(position);
  if (it == ranges.begin()) return;
  --it;
  if (it->first == position || it->second.end <= position) return;
  Range right = it->second;
  it->second.end = position;
  ranges.emplace(position, std::move(right));
}

void Hazards::fill_gaps(Ranges& ranges, uint64_t begin, uint64_t end) {
  uint64_t at = begin;
  for (auto it = ranges.lower_bound(begin); at < end; ++it) {
    const uint64_t next = it == ranges.end() ? end : std::min(it->first, end);
    if (next > at) it = ranges.emplace_hint(it, at, Range{next, kNoStep, {}});
    at = it->second.end;
  }
}

void Hazards::touch(uint32_t step, const Use& use, std::vector<uint32_t>* waits) {
  if (use.region.bytes == 0) return;
  Ranges& ranges = slots_[use.region.slot];
  const uint64_t begin = use.region.offset;
  const uint64_t end = begin + use.region.bytes;
  split_at(ranges, begin);
  split_at(ranges, end);
  fill_gaps(ranges, begin, end);
  const bool writes = use.access != Access::kRead;
  const auto first = ranges.lower_bound(begin);
  const auto last = ranges.lower_bound(end);
  for (auto it = first; it != last; ++it) {
    Range& range = it->second;
    if (range.writer != kNoStep && range.writer != step) waits->push_back(range.writer);
    if (writes) {
      for (uint32_t reader : range.readers) {
        if (reader != step) waits->push_back(reader);
      }
    } else if (range.readers.empty() || range.readers.back() != step) {
      range.readers.push_back(step);
    }
  }
  if (writes) {
    ranges.erase(first, last);
    ranges.emplace(begin, Range{end, step, {}});
  }
}

}  // namespace sotto
