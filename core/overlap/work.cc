#include "core/overlap/work.h"

#include <algorithm>

namespace sotto {

RoundTraffic RoundTraffic::of(const Plan& plan, size_t buckets) {
  RoundTraffic out;
  out.total = plan.traffic.total;
  if (buckets == 0) return out;
  const uint32_t last = plan.awaits[buckets - 1];
  std::vector<uint8_t> late(plan.steps.size(), 0);
  for (uint32_t i = 0; i < plan.steps.size(); ++i) {
    late[i] = i == last || std::ranges::any_of(plan.order.preds(i),
                                               [&](uint32_t before) { return late[before] != 0; });
    const MessageStep* const message = plan.steps[i].message();
    if (message == nullptr || !message->is_send || late[i] != 0) continue;
    if (message->message_class == MessageClass::kPayload)
      out.early_payload_bytes += message->data.bytes;
  }
  return out;
}

}  // namespace sotto
