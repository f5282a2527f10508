#include "core/plan/direct.h"

#include <algorithm>

namespace sotto {
namespace {

class Windows {
 public:
  explicit Windows(const DirectReduce& d) : d_(d) {
    const WindowShape shape = windows_of(d);
    elements_ = shape.elements;
    count_ = shape.count;
    held_ = shape.held;
    const bool receives = chunk(d.rank).count != 0;
    rows_ = d.b.scratch(std::max<uint64_t>(1, receives ? held_ * window_bytes() : 0));
  }

  uint32_t count() const { return count_; }

  std::vector<Range> segments(int32_t rank, uint32_t window) const {
    const Range all = chunk(rank);
    const uint64_t first = std::min(all.count, window * elements_);
    return segments_of({all.begin + first, std::min(elements_, all.count - first)}, d_.segment);
  }

  // Transports that match by order issue rounds in ascending order: rows of the next window come
  // before the results of this one, or with them.
  uint32_t scatter_round(uint32_t window) const {
    return d_.round + (apart() && window > 0 ? 2 * window - 1 : window);
  }
  uint32_t gather_round(uint32_t window) const {
    return d_.round + (apart() ? std::min(2 * window + 2, 2 * count_ - 1) : window + 1);
  }
  uint32_t end_round() const {
    if (count_ == 0) return d_.round;
    return (d_.reduced == nullptr ? scatter_round(count_ - 1) : gather_round(count_ - 1)) + 1;
  }

  Region row(int32_t peer, uint32_t window, Range segment) const {
    const uint64_t at = peer * elements_ + segment.begin - base(window);
    return {rows_, place(window) + at * d_.element, segment.count * d_.element};
  }

  void reduce(uint32_t window, Range segment) const {
    OperandRef rows =
        flat(rows_, Access::kRead, static_cast<uint32_t>(d_.element * 8), base(window));
    rows.offset = place(window);
    rows.footprint = Footprint::kRows;
    rows.rows = static_cast<uint32_t>(d_.size);
    rows.row_bytes = elements_ * d_.element;
    d_.reduce(segment, rows, base(window), elements_);
  }

 private:
  // Rows and results have rounds of their own.
  bool apart() const { return d_.reduced != nullptr && held_ > 1; }
  Range chunk(int32_t rank) const { return d_.chunk_of(static_cast<uint32_t>(rank)); }
  uint64_t base(uint32_t window) const { return chunk(d_.rank).begin + window * elements_; }
  uint64_t window_bytes() const { return d_.size * elements_ * d_.element; }
  uint64_t place(uint32_t window) const { return window % held_ * window_bytes(); }

  const DirectReduce& d_;
  uint64_t elements_ = 0;  // of one rank's part of a window
  uint32_t count_ = 0;
  uint32_t held_ = 0;
  uint32_t rows_ = kNoSlot;
};

}  // namespace

WindowShape windows_of(const DirectReduce& d) {
  const uint64_t held = d.held.bytes / d.held.count / static_cast<uint64_t>(d.size) / d.element;
  const uint64_t unit = d.segment == kUncut ? kNormBlock : d.segment;
  uint64_t longest = 0;
  for (int32_t k = 0; k < d.size; ++k)
    longest = std::max(longest, d.chunk_of(static_cast<uint32_t>(k)).count);
  WindowShape shape;
  shape.elements =
      std::min(unit * std::max<uint64_t>(1, held / unit), std::max<uint64_t>(1, longest));
  shape.count = static_cast<uint32_t>((longest + shape.elements - 1) / shape.elements);
  shape.held = std::min(shape.count, d.held.count);
  return shape;
}

void emit_direct_reduce(const DirectReduce& d) {
  const Windows windows(d);
  d.b.reserve_rounds(windows.end_round());
  // The next rank first, so that no rank is served by all at once.
  const auto peer = [&](int32_t i) { return (d.rank + i) % d.size; };
  std::vector<uint32_t> sends;  // of a window, in the order of its results
  for (uint32_t w = 0; w < windows.count(); ++w) {
    d.b.stage(Stage::kScatter);
    sends.clear();
    for (int32_t i = 1; i < d.size; ++i) {
      for (Range segment : windows.segments(peer(i), w)) {
        d.b.send(peer(i), d.contribution(segment), windows.scatter_round(w));
        sends.push_back(d.b.steps() - 1);
      }
    }
    const std::vector<Range> mine = windows.segments(d.rank, w);
    for (int32_t i = 1; i < d.size; ++i) {
      for (Range segment : mine)
        d.b.recv(peer(i), windows.row(peer(i), w, segment), windows.scatter_round(w));
    }
    d.b.stage(Stage::kGather);
    for (Range segment : mine) {
      windows.reduce(w, segment);
      if (d.reduced == nullptr) continue;
      const Region result = d.reduced(segment);
      for (int32_t i = 1; i < d.size; ++i) {
        if (d.root < 0 || peer(i) == d.root) d.b.send(peer(i), result, windows.gather_round(w));
      }
    }
    if (d.reduced == nullptr || (d.root >= 0 && d.rank != d.root)) continue;
    // Results may take the place of what was added up (in place): each of the message that its own
    // sender has received. So senders may start long before this rank has seen its own sends end.
    auto send = sends.begin();
    for (int32_t i = 1; i < d.size; ++i) {
      for (Range segment : windows.segments(peer(i), w)) {
        d.receive_reduced(peer(i), segment, windows.gather_round(w));
        d.b.elide_anti_dependency(*send++);
      }
    }
  }
  d.b.stage(Stage::kOther);
}

}  // namespace sotto
