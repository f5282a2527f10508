// The calls of NCCL that one group consists of: its headers and messages, on the communicator of
// all ranks, then its native collectives, on the communicator of their comm.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <vector>

#include "transports/nccl/communicators.h"
#include "transports/nccl/header_exchange.h"
#include "transports/nccl/staging.h"

namespace sotto::nccl {

class GroupCalls {
 public:
  explicit GroupCalls(const Communicators& communicators) : communicators_(communicators) {}

  void clear();
  // A message, or the native collective that it is the first message of. All native collectives of
  // a group are of one comm.
  Status add(const Transfer& transfer, Staging& staging, bool captured);

  // The stream is being captured: communicators of the calls end after the graph.
  Status stay_in_graph(std::span<const PeerHeader> headers, cudaStream_t captured) const;
  // Nothing is queued yet.
  bool fresh() const { return stage_ == Stage::kNew; }
  // Queues on the stream as far as NCCL is ready for it. IN_PROGRESS: it is to be called again.
  // Headers, if there are any, come with the messages. In front of native collectives they have an
  // NCCL group of their own, so that they are seen also if the collectives hang.
  Status queue(std::span<const PeerHeader> headers, cudaStream_t stream);

 private:
  // NCCL queues in the background: the first use of a connection takes until the peer has issued
  // its part.
  enum class Stage : uint8_t { kNew, kMessages, kNatives };
  // With the memory that NCCL accesses.
  struct Message {
    const Transfer* transfer;
    void* memory;
  };
  struct Native {
    const NativeCall* call;
    const void* in;
    void* out;
  };
  Result<Native> native(const Transfer& transfer, Staging& staging, bool captured) const;
  template <class Queue>
  Status together(const Communicator& on, Queue&& queue) const;
  Status queue_messages(std::span<const PeerHeader> headers, cudaStream_t stream) const;
  Status queue_natives(cudaStream_t stream) const;

  const Communicators& communicators_;
  std::vector<Message> messages_;
  std::vector<Native> natives_;
  const Communicator* natives_on_ = nullptr;
  Stage stage_ = Stage::kNew;
};

}  // namespace sotto::nccl
