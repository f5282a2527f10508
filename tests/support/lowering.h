// Plans of ranks that one transport reaches.
#pragma once

#include <memory>
#include <utility>

#include "core/plan/plan.h"

namespace sotto::test {

inline Result<std::shared_ptr<const Plan>> lower_for(LogicalPlan plan, const DeviceCaps& device,
                                                     const TransportCaps& transport,
                                                     Matching matching, int32_t size) {
  const LinkTarget link{matching, &transport, nullptr};
  LoweringTarget target;
  target.device = &device;
  target.links = {&link, 1};
  target.comm_size = size;
  return lower(std::move(plan), target);
}

}  // namespace sotto::test
