#include "core/engine/ordered_issue.h"

#include <algorithm>

namespace sotto {

const OrderedIssue::Group* OrderedIssue::first_ready() const {
  if (groups_.empty() || awaits_launch()) return nullptr;
  const Group& first = groups_.front();
  if (first.op->steps().group_pending[first.index] != 0) return nullptr;
  const Plan& plan = first.op->plan();
  const auto callers = [&](uint32_t step) { return plan.steps[step].lowered.callers; };
  const IssueGroup& group = plan.groups[first.index];
  // The caller's stream has not come so far.
  if (plan.links[group.link].stream_ordered && first.op->held() &&
      std::ranges::any_of(group.steps, callers))
    return nullptr;
  return &first;
}

}  // namespace sotto
