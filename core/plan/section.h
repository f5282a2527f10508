// What the builders of the uncompressed collectives share: a collective is built dtype by dtype.
#pragma once

#include <cstdint>
#include <vector>

#include "core/plan/builder.h"
#include "core/plan/collective_request.h"
#include "core/plan/layout.h"

namespace sotto {

// The tensors of one dtype of a collective.
struct Section {
  PlanBuilder& b;
  const CollectiveRequest& request;
  CollectiveSlots slots;
  FlatLayout layout;
  Dtype dtype;
  uint64_t element;  // bytes
  uint64_t segment;  // elements
  uint32_t round;    // first round of the section

  auto ranks() const { return static_cast<uint32_t>(request.size); }
  auto me() const { return static_cast<uint32_t>(request.rank); }
  // The peers in the order in which this rank serves them: the next rank first, so that no rank
  // is served by all at once.
  std::vector<int32_t> peers() const {
    std::vector<int32_t> out;
    for (int32_t i = 1; i < request.size; ++i) out.push_back((request.rank + i) % request.size);
    return out;
  }
  std::vector<Piece> pieces(Range range, uint64_t origin) const {
    return layout.pieces(range, origin);
  }
  uint32_t bits() const { return static_cast<uint32_t>(element * 8); }
};

// Elements of every rank's parts in a layout that is by parts: one range per rank.
std::vector<Range> ranges_of(const std::vector<Range>& parts, const std::vector<uint32_t>& tensors,
                             size_t ranks);

// Memory that holds a range of the layout in one piece: the tensor itself, or a packed copy of it.
// `copied`: a copy in any case.
Region contiguous(Section& s, uint32_t list_slot, Range range, bool use_target,
                  bool copied = false);

// Receives a range of the layout into the tensors of `list_slot`.
void receive_range(Section& s, int32_t peer, uint32_t list_slot, Range range, bool use_target,
                   uint32_t round);

}  // namespace sotto
