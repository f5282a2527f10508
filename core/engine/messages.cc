#include "core/engine/messages.h"

#include <algorithm>

namespace sotto {

Transfer& fill_transfer(Run& run, uint32_t step, std::span<const int32_t> ranks) {
  const MessageStep& s = *run.plan->steps[step].message();
  Transfer& t = run.transfers[s.lowered.transfer];
  t = Transfer{};
  t.op = &run.descriptors[s.descriptor];
  t.peer = ranks[static_cast<size_t>(s.peer)];
  t.round = s.round;
  t.segment = s.segment;
  const PlanMessages& messages = run.plan->messages;
  if (messages.links[s.lowered.link].matching == Matching::kByOrder)
    t.inputs = messages.groups[s.lowered.group].inputs;
  t.is_send = s.is_send;
  t.message_class = s.message_class;
  t.data = run.at(s.data);
  t.bytes = s.data.bytes;
  if (s.native != nullptr) {
    t.native = &s.native->call;
    t.native_in = run.at(s.native->in);
    t.native_out = run.at(s.native->out);
  }
  t.step = step;
  return t;
}

void count_receive(Run& run, const MessageStep& message) {
  const PlanMessages& messages = run.plan->messages;
  const size_t index = static_cast<size_t>(message.descriptor) * messages.comm_size + message.peer;
  const auto& rounds = messages.receives[index];
  const auto it = std::ranges::lower_bound(rounds, message.round, {}, &RoundReceives::round);
  run.receives_posted = true;
  ++run.announce[index].posted[static_cast<size_t>(it - rounds.begin())];
}

void announce_receives(Run& run, std::span<const int32_t> ranks, const LinkTable& links) {
  const PlanMessages& messages = run.plan->messages;
  if (!run.receives_posted) return;
  run.receives_posted = false;
  for (size_t index = 0; index < messages.receives.size(); ++index) {
    const auto& rounds = messages.receives[index];
    Run::Announce& a = run.announce[index];
    uint64_t largest = 0;
    bool advanced = false;
    while (a.round_index < rounds.size() &&
           a.posted[a.round_index] == rounds[a.round_index].count) {
      largest = std::max(largest, rounds[a.round_index].largest);
      ++a.round_index;
      advanced = true;
    }
    if (!advanced) continue;
    const int32_t peer = ranks[index % messages.comm_size];
    links.to(peer).messages->ready(peer, run.descriptors[index / messages.comm_size],
                                   rounds[a.round_index - 1].round, largest);
  }
}

}  // namespace sotto
