// Builders of the uncompressed collectives for ranks that exchange messages alike, wherever they
// are; their algorithms are told in plan/collectives.h.
#pragma once

#include "core/plan/builder.h"
#include "core/plan/collective_request.h"

namespace sotto {

// As emit_collective, whatever levels the request has.
Status emit_one_level(PlanBuilder& builder, const CollectiveRequest& request,
                      const CollectiveSlots& slots);

}  // namespace sotto
