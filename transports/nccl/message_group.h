// A message group: messages that were issued together, until the device has executed them. Groups
// are used again with the memory of their vectors, so that nothing is allocated in steady state.
//
// begin, prepare, launch until it is no longer in progress, then deliver and release when the
// device has executed it. A group that is part of a CUDA graph is executed as often as the graph is
// launched.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <vector>

#include "transports/nccl/communicators.h"
#include "transports/nccl/group_calls.h"
#include "transports/nccl/headed_peers.h"
#include "transports/nccl/header_exchange.h"
#include "transports/nccl/pools.h"
#include "transports/nccl/staging.h"

namespace sotto::nccl {

class MessageGroup {
 public:
  MessageGroup(const Communicators& communicators, PinnedPool& pinned, EventPool& events);

  // `reports`: messages are reported to the sink, else the engine has events of its own.
  // `captured`: the operation into whose graph the group goes, known by this place, or null.
  void begin(cudaStream_t stream, bool reports, const OpDescriptor* captured);
  // Memory, headers and calls of the messages. They stay as they are while the group has them.
  // Headers are for ranks with which an operation has none in `headed`.
  Status prepare(std::span<Transfer* const> transfers, HeadedPeers& headed);
  // Queues the group behind `after`, which may be null. IN_PROGRESS: it is to be called again.
  Status launch(cudaEvent_t after);
  bool queued() const { return queued_; }
  // Whether the device or NCCL may still access the memory of the group.
  bool working() const;
  // The engine may use the messages again.
  void forget_transfers() { transfers_.clear(); }
  // What has arrived goes where it is expected.
  void deliver() const { staging_.deliver(); }
  // Gives pinned memory and events back.
  void release();

  // Of a group that is part of a graph: a launch is awaited, for the operations that there are now;
  // or it has ended.
  void restart(Counters& counters);
  void complete(Counters& counters);
  bool executing() const { return executing_; }

  cudaStream_t stream() const { return stream_; }
  cudaEvent_t event() const { return event_; }  // behind the group; null: it is part of a graph
  bool reports() const { return reports_; }
  const OpDescriptor* captured() const { return captured_; }
  // Operations that messages are of.
  std::span<const OpKey> keys() const { return keys_; }
  std::span<Transfer* const> transfers() const { return transfers_; }
  bool has(const OpKey& key) const;
  void count_transfers(Counters& counters) const;
  HeaderExchange& headers() { return headers_; }
  const HeaderExchange& headers() const { return headers_; }

 private:
  const Communicators& communicators_;
  EventPool& events_;
  HeaderExchange headers_;
  Staging staging_;
  GroupCalls calls_;
  cudaStream_t stream_ = nullptr;
  bool reports_ = false;
  const OpDescriptor* captured_ = nullptr;
  std::vector<OpKey> keys_;
  std::vector<Transfer*> transfers_;
  cudaEvent_t event_ = nullptr;
  bool queued_ = false;
  bool in_progress_ = false;  // NCCL queues it, from a thread of its own
  bool executing_ = false;
};

}  // namespace sotto::nccl
