// Groups that are part of a CUDA graph, and queries about the groups of an operation.
#include <algorithm>
#include <utility>

#include "cuda/calls/cuda_calls.h"
#include "transports/nccl/nccl_transport.h"

namespace sotto::nccl {

template <class Visit>
void NcclTransport::visit_recorded(const OpPosting& op, Visit&& visit) {
  for (auto it = recorded_.begin(); it != recorded_.end();) {
    const auto group = it++;
    if (group->recorded == &op) visit(group);
  }
}

void NcclTransport::restart(const OpPosting& op) {
  visit_recorded(op, [&](auto group) {
    group->executing = true;
    for (PeerHeader& header : group->headers) {
      // With the number that the operation has this time.
      header.mine = make_group_header(group->transfers, header.peer);
      write_header(header);
      header.seen = false;
      header.meant = ok_status();
      count_header(header.peer, true);
    }
    for (const Transfer* t : group->transfers) count(*t);
  });
}

void NcclTransport::release_captured(const OpPosting& op) {
  visit_recorded(op, [&](auto group) {
    const OnDevice on(communicator_->device());
    release(*group);
    spare_.splice(spare_.begin(), recorded_, group);
  });
}

void NcclTransport::retire(const OpPosting& op) {
  visit_recorded(op, [&](auto group) {
    if (!std::exchange(group->executing, false)) return;
    for (const PeerHeader& header : group->headers) count_header(header.peer, false);
  });
}

Status NcclTransport::verify(const OpPosting& op) {
  Status recorded;
  visit_recorded(op, [&](auto group) {
    if (!group->executing || !recorded.ok()) return;
    const auto unseen = [](const PeerHeader& header) { return !header.seen; };
    if (const PeerHeader* differs = check_headers(*group); differs != nullptr) {
      recorded = differs->meant;
    } else if (!failed_ && std::any_of(group->headers.begin(), group->headers.end(), unseen)) {
      recorded = missing_group_header();
    }
  });
  SOTTO_TRY(recorded);
  for (MessageGroup& group : groups_) {
    if (std::find(group.keys.begin(), group.keys.end(), op.key) == group.keys.end()) continue;
    if (const PeerHeader* differs = check_headers(group); differs != nullptr) return differs->meant;
  }
  for (const auto& [key, meant] : differing_) {
    if (key == op.key) return meant;
  }
  return ok_status();
}

}  // namespace sotto::nccl
