// What the data links of a transport share, and the rank at the other end of one.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/clock.h"
#include "core/iface/transport.h"
#include "core/wire/control.h"
#include "core/wire/frame.h"
#include "transports/framed/counters.h"
#include "transports/framed/op_table.h"

namespace sotto::framed {

struct FlowLimits {
  // Equal on all ranks of a group.
  uint64_t eager_bytes = 65536;
  uint64_t credit_bytes = 1u << 20;  // of whole frames
  // This rank's own. Percent of the bytes, below 100, for bulk in the background beside other bulk.
  uint32_t background_share = 10;
};

// Events of data links for the control plane.
class FailureListener {
 public:
  virtual ~FailureListener() = default;
  // The payload of a failure frame. An error breaks the carrier.
  virtual Status on_failure_frame(int32_t peer, wire::Bytes payload) = 0;
  // The last carrier to the peer has ended.
  virtual void on_disconnected(int32_t peer) = 0;
};

struct TransportCore {
  TransportCore(int32_t rank_number, int32_t ranks, TransferSink& s, FlowLimits l, const Clock& c)
      : rank(rank_number),
        name(fmt::format("rank {}", rank_number)),
        sink(s),
        limits(l),
        clock(c),
        counters(ranks) {
    ops.set_peers(ranks);
  }
  int32_t rank;
  std::string name;  // of this rank, for errors about connections
  TransferSink& sink;
  FlowLimits limits;
  const Clock& clock;
  CounterTable counters;
  OpTable ops;
  FailureListener* failures = nullptr;  // null: refuses failure frames
};

// The peer of one link: its flows, and whether the link has failed.
class Peer {
 public:
  // name: for errors.
  Peer(TransportCore& core, int32_t rank, std::string name)
      : core_(core), rank_(rank), name_(std::move(name)) {}

  TransportCore& core() const { return core_; }
  int32_t rank() const { return rank_; }
  const std::string& name() const { return name_; }

  Flow& flow(const OpKey& op);
  // All flows, linked by next_of_peer, the oldest first.
  Flow* flows() const { return core_.ops.flows_of(rank_); }
  // The flow of a frame; null: a late frame of an operation that is complete here. PROTOCOL: the
  // peer has another operation under this key.
  Result<Flow*> flow_of_frame(const wire::FrameHeader& header);
  // Compares the peer's signature of the operation with the descriptor.
  void check_posted(const Flow& flow);

  // The first cause is reported.
  void fail(Status why);
  bool failed() const { return failed_; }

 private:
  Status agree(const OpKey& op, const OpSignature& own, const OpSignature& theirs) const;

  TransportCore& core_;
  const int32_t rank_;
  const std::string name_;
  bool failed_ = false;
};

}  // namespace sotto::framed
