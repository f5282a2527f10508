#include "core/overlap/work.h"

#include <algorithm>
#include <span>

namespace sotto {

RoundTraffic RoundTraffic::of(const Plan& plan, size_t buckets) {
  RoundTraffic out;
  out.total = plan.traffic.total;
  if (buckets == 0) return out;
  // What a step needs: padding needs no gradient, and its way there hides none.
  enum Needs : uint8_t { kNothing, kEarly, kLast };
  std::vector<Needs> needs(plan.steps.size(), kNothing);
  const auto inputs = std::span(plan.awaits).first(buckets);
  for (const uint32_t input : inputs) needs[input] = kEarly;
  needs[inputs.back()] = kLast;
  for (uint32_t i = 0; i < plan.steps.size(); ++i) {
    for (const uint32_t before : plan.order.preds(i)) needs[i] = std::max(needs[i], needs[before]);
    const MessageStep* const message = plan.steps[i].message();
    if (message == nullptr || !message->is_send || needs[i] != kEarly) continue;
    if (message->message_class == MessageClass::kPayload)
      out.early_payload_bytes += message->data.bytes;
  }
  return out;
}

}  // namespace sotto
