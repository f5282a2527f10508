#include "transports/nccl/in_flight_groups.h"

#include <algorithm>
#include <iterator>

#include "cuda/calls/cuda_calls.h"

namespace sotto::nccl {
namespace {

constexpr uint64_t kGroupsAtOnce = 128;  // groups with memory for their headers from the start

}  // namespace

InFlightGroups::InFlightGroups(const Communicators& communicators)
    : communicators_(communicators),
      pinned_(communicators.all().device()),
      events_(communicators.all().device()),
      headed_(communicators.all().size()) {}

Status InFlightGroups::reserve() {
  return pinned_.reserve(HeaderExchange::bytes(communicators_.all().size()), kGroupsAtOnce);
}

MessageGroup* InFlightGroups::unqueued() {
  return groups_.empty() || groups_.back().queued() ? nullptr : &groups_.back();
}

MessageGroup& InFlightGroups::begin(cudaStream_t stream, bool reports,
                                    const OpDescriptor* captured) {
  if (spare_.empty()) spare_.emplace_back(communicators_, pinned_, events_);
  groups_.splice(groups_.end(), spare_, spare_.begin());
  groups_.back().begin(stream, reports, captured);
  return groups_.back();
}

Status InFlightGroups::launch(MessageGroup& group) {
  const bool in_order = last_stream_ == group.stream();
  SOTTO_TRY(group.launch(in_order ? nullptr : last_event_));
  if (group.captured() != nullptr) return ok_status();
  last_stream_ = group.stream();
  last_event_ = group.event();
  return ok_status();
}

std::list<MessageGroup> InFlightGroups::take_last() {
  std::list<MessageGroup> taken;
  taken.splice(taken.end(), groups_, std::prev(groups_.end()));
  return taken;
}

MessageGroup* InFlightGroups::oldest_queued() {
  return groups_.empty() || !groups_.front().queued() ? nullptr : &groups_.front();
}

void InFlightGroups::release(MessageGroup& group) {
  if (last_event_ == group.event()) last_event_ = nullptr;
  group.release();
}

void InFlightGroups::pop_oldest() { spare_.splice(spare_.begin(), groups_, groups_.begin()); }

void InFlightGroups::reuse(std::list<MessageGroup> captured) {
  for (MessageGroup& group : captured) {
    const OnDevice on(communicators_.all().device());
    group.release();
  }
  spare_.splice(spare_.begin(), captured);
}

const PeerHeader* InFlightGroups::check() {
  for (MessageGroup& group : groups_) {
    if (group.captured() != nullptr) continue;
    if (const PeerHeader* differs = group.headers().check(); differs != nullptr) return differs;
  }
  return nullptr;
}

Status InFlightGroups::verify(const OpKey& key) {
  for (MessageGroup& group : groups_) {
    if (!group.has(key)) continue;
    if (const PeerHeader* differs = group.headers().check(); differs != nullptr)
      return differs->meant;
  }
  for (const auto& [of, meant] : differing_) {
    if (of == key) return meant;
  }
  return ok_status();
}

bool InFlightGroups::working() const {
  const OnDevice on(communicators_.all().device());
  const bool any = std::ranges::any_of(groups_, &MessageGroup::working);
  forget_cuda_error(cudaErrorNotReady);
  return any;
}

void InFlightGroups::leave_memory_behind() {
  pinned_.leave_behind();
  events_.leave_behind();
}

void InFlightGroups::forget() {
  for (MessageGroup& group : groups_) {
    // An operation that had all its messages before is asked about later.
    if (const PeerHeader* differs = group.headers().check(); differs != nullptr)
      for (const OpKey& key : group.keys()) differing_.emplace_back(key, differs->meant);
    group.release();
  }
  groups_.clear();
  last_event_ = nullptr;
}

}  // namespace sotto::nccl
