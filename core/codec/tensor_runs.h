// The elements of a layout's tensors in their own order, a bounded number at a time: how state that
// may be larger than the host's memory goes in and out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/base/status.h"
#include "core/codec/compressed_layout.h"

namespace sotto {

// Longest run: 1 MiB of float32. A multiple of every block that state has.
inline constexpr uint64_t kRunElements = uint64_t{1} << 18;

// Takes values in order.
using FloatSink = std::function<Status(std::span<const float>)>;
// Gives the next values.
using FloatSource = std::function<Status(std::span<float>)>;

// A run of one tensor, or of padding that is data.
struct TensorRun {
  uint32_t tensor = 0;
  uint64_t at = 0;  // in the tensor, a multiple of kRunElements
  uint64_t count = 0;
  std::span<const Piece> pieces;  // of the tensor

  // f(piece, flat element, element of the run, count), which returns a Status, for what is
  // contiguous in flat space.
  template <class F>
  Status each_part(F&& f) const {
    const uint64_t end = at + count;
    auto it = std::partition_point(pieces.begin(), pieces.end(),
                                   [this](const Piece& p) { return p.offset + p.count <= at; });
    for (; it != pieces.end() && it->offset < end; ++it) {
      const uint64_t first = std::max(it->offset, at);
      const uint64_t last = std::min(it->offset + it->count, end);
      SOTTO_TRY(f(*it, it->flat + (first - it->offset), first - at, last - first));
    }
    return ok_status();
  }
};

// f(run) for all elements of the tensors `first` to `last` - 1 (padding that is data comes after
// the tensors).
template <class F>
Status for_each_tensor_run(const CompressedLayout& layout, uint32_t first, uint32_t last, F&& f) {
  for (uint32_t t = first; t < last; ++t) {
    const std::vector<Piece> pieces = layout.tensor_pieces(t);
    const uint64_t count = pieces.empty() ? 0 : pieces.back().offset + pieces.back().count;
    for (uint64_t at = 0; at < count; at += kRunElements)
      SOTTO_TRY(f(TensorRun{t, at, std::min(kRunElements, count - at), pieces}));
  }
  return ok_status();
}

inline uint32_t tensor_count(const CompressedLayout& layout, bool padding) {
  return static_cast<uint32_t>(layout.tensors().size() + (padding ? layout.padding().size() : 0));
}

// f(run) for all of them. padding: also for padding that is data.
template <class F>
Status for_each_run(const CompressedLayout& layout, bool padding, F&& f) {
  return for_each_tensor_run(layout, 0, tensor_count(layout, padding), std::forward<F>(f));
}

}  // namespace sotto
