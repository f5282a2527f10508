// Plans of all ranks of a comm, before lowering: what one sends, another one receives.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <tuple>
#include <vector>

#include "core/plan/plan.h"

namespace sotto::test {

// What both ends of a message know of it.
using PlannedMessage = std::tuple<int32_t, int32_t, uint32_t, uint32_t, uint32_t, uint64_t>;

// Every message is sent and received, in rounds of the same number and groups of the same.
inline void expect_matched(const std::vector<LogicalPlan>& plans) {
  std::multiset<PlannedMessage> sent, received;
  for (size_t r = 0; r < plans.size(); ++r) {
    const auto me = static_cast<int32_t>(r);
    for (const Step& step : plans[r].steps) {
      const MessageStep* const m = step.message();
      if (m == nullptr) continue;
      if (m->is_send)
        sent.emplace(me, m->peer, m->round, m->issue_round, m->segment, m->data.bytes);
      else
        received.emplace(m->peer, me, m->round, m->issue_round, m->segment, m->data.bytes);
    }
  }
  EXPECT_FALSE(sent.empty());
  EXPECT_EQ(sent, received);
}

}  // namespace sotto::test
