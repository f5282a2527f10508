#include "core/engine/stall.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "core/base/text.h"

namespace sotto {
namespace {

// Of a plan with inputs: the last one before a message is what its sender seems to lack.
std::string missing_input(const Plan& plan, uint32_t step) {
  if (!plan.slice_steps.empty()) return "";
  const auto before = std::ranges::lower_bound(plan.awaits, step) - plan.awaits.begin();
  if (before == 0) return "";
  return fmt::format("nothing of bucket {} of {}, ", before - 1, plan.awaits.size() - 1);
}

}  // namespace

FailureCause stall_cause(const OpRequest& request, const ControlPlane* control,
                         int64_t stalled_ns) {
  const Run& run = *request.run;
  struct Peer {
    int32_t root_rank;
    uint32_t sends = 0, receives = 0, came = 0;  // messages: still open; received
    std::optional<uint32_t> first = {};          // step: the first receive that is open
    size_t descriptor = 0;                       // of this, or of the first send that is open
  };
  std::vector<Peer> peers;
  bool some_absent = false;  // a peer of which nothing has come at all
  for (int32_t p = 0; p < run.plan->messages.comm_size; ++p) {
    Peer peer{(*request.ranks)[static_cast<size_t>(p)]};
    for (uint32_t i = 0; i < run.plan->steps.size(); ++i) {
      const MessageStep* const message = run.plan->steps[i].message();
      if (message == nullptr || message->peer != p) continue;
      const bool done = run.steps.progress[i] == StepProgress::kDone;
      if (message->is_send) {
        if (!done && peer.sends++ + peer.receives == 0) peer.descriptor = message->descriptor;
      } else {
        ++(done ? peer.came : peer.receives);
        if (done || peer.first) continue;
        peer.first = i;
        peer.descriptor = message->descriptor;
      }
    }
    if (peer.sends + peer.receives == 0) continue;
    some_absent = some_absent || (peer.receives > 0 && peer.came == 0);
    peers.push_back(peer);
  }
  if (some_absent)
    std::erase_if(peers, [](const Peer& p) { return p.receives == 0 || p.came > 0; });
  std::string what = "a local operation";
  if (!run.descriptors.empty()) {
    // Of a group, the call that waits.
    const OpDescriptor& d = run.descriptors[peers.empty() ? 0 : peers.front().descriptor];
    what = fmt::format("{} {}", name_of(d.key), describe(d.signature));
  }
  const int32_t self = control != nullptr ? control->rank() : -1;
  FailureCause cause{Code::kTimeout, self, {}, self};
  for (const Peer& p : peers) {
    if (cause.waits.empty()) cause.rank = p.root_rank;
    cause.waits += fmt::format("{}rank {} ({} from it, {} to it, {}last heard from {} ms ago)",
                               cause.waits.empty() ? "waiting for " : ", ", p.root_rank,
                               counted(p.receives, "message"), p.sends,
                               p.first ? missing_input(*run.plan, *p.first) : "",
                               control != nullptr ? control->silent_ms(p.root_rank) : 0);
  }
  if (peers.empty()) cause.waits = "waiting for the local device";
  cause.text = fmt::format("rank {}: {} made no progress for {:.1f} s (limit {:.1f} s)", self, what,
                           static_cast<double>(stalled_ns) * 1e-9,
                           static_cast<double>(request.timeout_us) * 1e-6);
  return cause;
}

}  // namespace sotto
