#include "core/engine/ordered_issue.h"

#include <algorithm>

namespace sotto {

const OrderedIssue::Group* OrderedIssue::first_ready() const {
  if (groups_.empty() || awaits_launch()) return nullptr;
  const Group& first = groups_.front();
  if (first.op->steps().group_pending[first.index] != 0) return nullptr;
  const Plan& plan = first.op->plan();
  const auto user = [&](uint32_t step) { return plan.steps[step].user; };
  const IssueGroup& group = plan.messages.groups[first.index];
  // The user's stream has not reached the operation.
  if (plan.messages.links[group.link].stream_ordered && first.op->blocked() &&
      std::ranges::any_of(group.steps, user))
    return nullptr;
  return &first;
}

}  // namespace sotto
