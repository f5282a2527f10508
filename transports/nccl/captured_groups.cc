#include "transports/nccl/captured_groups.h"

#include <algorithm>

namespace sotto::nccl {

std::list<MessageGroup> CapturedGroups::forget(const OpDescriptor& op) {
  std::list<MessageGroup> forgotten;
  for (auto it = groups_.begin(); it != groups_.end();) {
    const auto group = it++;
    if (group->captured() == &op) forgotten.splice(forgotten.end(), groups_, group);
  }
  return forgotten;
}

void CapturedGroups::restart(const OpDescriptor& op, Counters& counters) {
  for (MessageGroup& group : groups_) {
    if (group.captured() == &op) group.restart(counters);
  }
}

void CapturedGroups::complete(const OpDescriptor& op, Counters& counters) {
  for (MessageGroup& group : groups_) {
    if (group.captured() == &op) group.complete(counters);
  }
}

bool CapturedGroups::executing() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const MessageGroup& group) { return group.executing(); });
}

const PeerHeader* CapturedGroups::check() {
  for (MessageGroup& group : groups_) {
    if (!group.executing()) continue;
    if (const PeerHeader* differs = group.headers().check(); differs != nullptr) return differs;
  }
  return nullptr;
}

Status CapturedGroups::verify(const OpDescriptor& op, bool complete) {
  for (MessageGroup& group : groups_) {
    if (group.captured() != &op || !group.executing()) continue;
    if (const PeerHeader* differs = group.headers().check(); differs != nullptr)
      return differs->meant;
    if (complete && !group.headers().all_seen()) return missing_group_header();
  }
  return ok_status();
}

}  // namespace sotto::nccl
