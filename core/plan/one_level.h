// Builders of the uncompressed collectives for ranks that exchange messages alike, wherever they
// are; their algorithms are told in plan/collectives.h.
#pragma once

#include <cstdint>
#include <vector>

#include "core/plan/builder.h"
#include "core/plan/collective_request.h"

namespace sotto {

// As emit_collective, whatever levels the request has.
Status emit_one_level(PlanBuilder& builder, const CollectiveRequest& request,
                      const CollectiveSlots& slots);

// A barrier of the ranks behind the receives that `received` has; appends its own to them. Every
// send waits for all of them: what the last one brought says nothing of the others.
void emit_barrier(PlanBuilder& builder, int32_t rank, int32_t size,
                  std::vector<uint32_t>& received);

}  // namespace sotto
