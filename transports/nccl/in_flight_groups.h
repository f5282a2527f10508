// Groups in flight, in the order of issue, and what they share: pinned memory, events, and groups
// that are used again.
#pragma once

#include <cuda_runtime_api.h>

#include <list>
#include <span>
#include <utility>
#include <vector>

#include "transports/nccl/communicators.h"
#include "transports/nccl/headed_peers.h"
#include "transports/nccl/message_group.h"
#include "transports/nccl/pools.h"

namespace sotto::nccl {

class InFlightGroups {
 public:
  explicit InFlightGroups(const Communicators& communicators);

  // Pins memory for the headers of the groups that are usually in flight, so that issuing one pins
  // none.
  Status reserve();
  bool empty() const { return groups_.empty(); }

  // The group that is being issued; null: all are queued.
  MessageGroup* unqueued();
  // A new group, as MessageGroup::begin has it. All others are queued.
  MessageGroup& begin(cudaStream_t stream, bool reports, const OpDescriptor* captured);
  // Gives the group its messages, as MessageGroup::prepare has it.
  Status prepare(MessageGroup& group, std::span<Transfer* const> transfers) {
    return group.prepare(transfers, headed_);
  }
  // The operation has no more groups.
  void complete(const OpKey& key) { headed_.forget(key); }
  // Queues the group behind those before it. IN_PROGRESS: it is to be called again.
  Status launch(MessageGroup& group);
  // The group that was begun last, which is part of a graph and so not in flight.
  std::list<MessageGroup> take_last();

  // The oldest group, if it is queued; else null.
  MessageGroup* oldest_queued();
  // The device has executed the group: its memory and its event are given back.
  void release(MessageGroup& group);
  // The oldest group, which was released, is complete.
  void pop_oldest();
  // Groups that were part of a graph are used again.
  void reuse(std::list<MessageGroup> captured);

  // Compares headers that have arrived. Null: nothing is meant for something else.
  const PeerHeader* check();
  // PROTOCOL if what has arrived for the operation was meant for something else, also in groups
  // that were stopped.
  Status verify(const OpKey& key);
  // Whether the device may still access memory of a group.
  bool working() const;
  // The communicators have ended, and the device does not work any more.
  void forget();
  // It may work on: memory of groups is not given back.
  void leave_memory_behind();

 private:
  const Communicators& communicators_;
  PinnedPool pinned_;
  EventPool events_;
  HeadedPeers headed_;
  cudaStream_t last_stream_ = nullptr;  // of the group that was queued last
  cudaEvent_t last_event_ = nullptr;    // behind it, if it is not complete
  std::list<MessageGroup> groups_;      // all but the last are queued
  std::list<MessageGroup> spare_;
  std::vector<std::pair<OpKey, Status>> differing_;  // operations of groups that were stopped
};

}  // namespace sotto::nccl
