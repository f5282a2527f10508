// The first level of a codec in two levels: the ranks of a host average tensors in full precision,
// each of them what lies in its shard (specification 1.11: H2 (a); H1, where the first rank has the
// only shard).
#pragma once

#include <cstdint>

#include "core/codec/compressed_request.h"
#include "core/plan/layout.h"

namespace sotto {

class HostMean {
 public:
  // r: in two levels; it has to live as long.
  HostMean(PlanBuilder& builder, const CompressedRequest& r);

  // Averages a section, when what it needs has arrived.
  void emit(uint32_t section);
  // The tensors as an encoder reads them. Of each the part is there that lies in this rank's shard.
  uint32_t list() const { return list_; }

 private:
  // Elements of a tensor in every shard of a section.
  struct Parts {
    uint32_t first = 0;  // tensor
    std::vector<Range> ranges;
    std::vector<uint64_t> counts;  // of all shards
  };
  Parts parts_of(uint32_t section) const;

  PlanBuilder& b_;
  const CompressedRequest& r_;
  uint32_t list_ = kNoSlot;
};

}  // namespace sotto
