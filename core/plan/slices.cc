#include "core/plan/slices.h"

#include <algorithm>

namespace sotto {

MessageSlices::MessageSlices(const Slicing& slicing, std::span<const Step> steps) {
  if (slicing.rounds * slicing.per_round < 2) return;
  count_ = slicing.rounds * slicing.per_round;
  std::map<Direction, std::vector<uint64_t>> bytes;  // up to the end of each segment
  for (const Step& step : steps) {
    const MessageStep* const message = step.message();
    if (message == nullptr || message->issue_round < slicing.first_round) continue;
    std::vector<uint64_t>& ends = bytes[direction(*message)];
    ends.push_back((ends.empty() ? 0 : ends.back()) + message->data.bytes);
  }
  for (const auto& [of, ends] : bytes) {
    const uint32_t first = (std::get<0>(of) - slicing.first_round) * slicing.per_round;
    uint64_t begin = 0;
    for (const uint64_t end : ends) {
      // Where its middle is.
      const uint64_t slice =
          (begin + end) * slicing.per_round / std::max<uint64_t>(1, 2 * ends.back());
      slices_[of].push_back(
          first + static_cast<uint32_t>(std::min<uint64_t>(slice, slicing.per_round - 1)));
      begin = end;
    }
  }
}

uint32_t MessageSlices::of(const MessageStep& message) const {
  const auto slices = slices_.find(direction(message));
  return slices == slices_.end() ? 0 : slices->second[message.segment];
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
