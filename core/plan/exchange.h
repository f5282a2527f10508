// Builders of the collectives that move data between ranks without reducing it: gather, scatter,
// all-to-all.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "core/plan/section.h"

namespace sotto {

// Layout of gather and scatter: by_rank over parts on the root (`offset` addresses the whole
// tensor, `target` the part), the concatenated parts elsewhere.
void emit_gather(Section& s);
void emit_scatter(Section& s);

// Both forms of the all-to-all. All dtypes share a round; counts that differ from pair to pair are
// compared in a round before it.
void emit_all_to_all(PlanBuilder& builder, const CollectiveRequest& request,
                     const CollectiveSlots& slots,
                     const std::map<Dtype, std::vector<uint32_t>>& by_dtype);

}  // namespace sotto
