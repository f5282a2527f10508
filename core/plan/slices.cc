#include "core/plan/slices.h"

#include <algorithm>

namespace sotto {

MessageSlices::MessageSlices(const Slicing& slicing, std::span<const Step> steps)
    : slicing_(slicing) {
  if (slicing.per_round == 0) return;
  count_ = std::max<uint32_t>(1, slicing.rounds * slicing.per_round);
  for (const Step& step : steps) {
    if (const MessageStep* message = step.message()) ++messages_[direction(*message)];
  }
}

uint32_t MessageSlices::of(const MessageStep& message) const {
  if (count_ == 1 || message.issue_round < slicing_.first_round) return 0;
  const uint32_t before = (message.issue_round - slicing_.first_round) * slicing_.per_round;
  const uint64_t place = uint64_t{message.segment} * slicing_.per_round;
  return before + static_cast<uint32_t>(place / messages_.at(direction(message)));
}

std::vector<uint32_t> steps_by_slice(const Plan& plan) {
  std::vector<uint32_t> slices(plan.steps.size(), 0);  // of a step: the last one that it needs
  std::vector<uint32_t> steps(plan.awaits.size() + 1, 0);
  for (uint32_t i = 0; i < slices.size(); ++i) {
    for (const uint32_t before : plan.order.preds(i))
      slices[i] = std::max(slices[i], slices[before]);
    const MessageStep* const message = plan.steps[i].message();
    if (message != nullptr &&
        plan.messages.links[message->lowered.link].matching == Matching::kByOrder)
      slices[i] = std::max(slices[i], plan.messages.groups[message->lowered.group].inputs);
  }
  for (uint32_t k = 0; k < plan.awaits.size(); ++k) slices[plan.awaits[k]] = k + 1;
  for (const uint32_t slice : slices) ++steps[slice];
  for (size_t k = 1; k < steps.size(); ++k) steps[k] += steps[k - 1];
  return steps;
}

}  // namespace sotto
