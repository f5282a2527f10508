// A transport moves messages between ranks of one root comm. Plans say what is sent and received;
// the engine calls the transports; splits of a comm share those of their root.
//
// How messages find their receive makes two kinds:
// - MessageTransport: messages carry their match key (inproc, tcp). Sends and receives may be
// issued
//   in any order.
// - QueueTransport: messages of a pair of ranks match in the order of issue (nccl). The engine
//   issues whole rounds, each as one group, in the same order on every rank.
//
// Threads: everything is called by the thread that drives the engine (one at a time) unless said
// otherwise.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/dtype.h"
#include "core/base/status.h"
#include "core/iface/device.h"

namespace sotto {

class Device;
class Driver;
enum class ReduceOp : uint8_t;

// Collectives that a transport has itself (TransportCaps::native), the same on all ranks.
using NativeCollectives = uint32_t;
inline constexpr NativeCollectives kNativeMoves = 1;  // all-gather and broadcast
// All-reduce and reduce-scatter of integers: any order has the same bits.
inline constexpr NativeCollectives kNativeIntegers = 2;
// And of floating-point numbers, in an order of the transport's own.
inline constexpr NativeCollectives kNativeFloats = 4;

// What a direct reduction keeps of what arrives (plan/direct.h). The numbers are those of byte
// streams. Fewer would delay senders on a long path, where what receivers have announced has to
// cover the bytes under way (1 Gbit/s and 50 ms: 6 MB); with more, connections that share a link
// get farther apart, and the slowest ends alone (3 % at 1 Gbit/s, W = 4, with twice as many).
struct HeldWindows {
  uint32_t count = 4;         // windows in memory at a time
  uint64_t bytes = 12 << 20;  // of all of them together, of all ranks
  bool operator==(const HeldWindows&) const = default;
};

struct TransportCaps {
  const char* name = "";
  // Host memory only: buffers of other devices are staged by the lowering pass.
  bool host_memory_only = true;
  // Largest message that plans make unless the user says otherwise. 0: messages are not cut, for
  // transports that move a round as a whole.
  uint64_t segment_bytes = 256 * 1024;
  HeldWindows held = {};
  // Queue transports: sends and receives are queued on a device lane and complete there, as kernels
  // do (nccl).
  bool stream_ordered = false;
  // Queue transports: those that plans may use, of the root comm and of comms that were joined.
  NativeCollectives native = 0;
};

// How plans cut messages and windows.
struct MessageSizes {
  uint64_t segment_bytes = 0;  // as in TransportCaps
  HeldWindows held = {};
  bool by_order = false;  // some links of this rank match messages by their order (Matching)
};
// Sizes for messages that may go over any of these transports: as soon as one cuts messages, its
// segments, and the windows with the fewest bytes; without by_order.
MessageSizes common_sizes(std::span<const TransportCaps* const> transports);

// Names an operation on all ranks alike. `comm` is the epoch of the comm, unique among the comms of
// a root; `number` counts its collectives from 0. Point-to-point operations have a number space of
// their own per ordered pair.
struct OpKey {
  uint64_t comm = 0;
  uint64_t number = 0;
  bool operator==(const OpKey&) const = default;
};
// Point-to-point numbers: bit 63 set, then source (16 bits), destination (16 bits), counter (31
// bits).
constexpr uint64_t p2p_number(uint32_t source, uint32_t destination, uint32_t counter) {
  return (uint64_t{1} << 63) | (uint64_t{source & 0xffffu} << 47) |
         (uint64_t{destination & 0xffffu} << 31) | (counter & 0x7fffffffu);
}

// What an operation is, for mismatch reports. Fixed layout: it crosses the network.
enum class OpKind : uint16_t {
  kBarrier = 1,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kSendRecv,
  kGroup,
  kOptimStep,
  kSetup,
  kAllToAll,
  kAllToAllParts,  // counts differ from pair to pair: not in the signature, compared by the plan
  kGather,
  kScatter,
  kReduce,
  kAllGatherParts,      // unequal counts
  kReduceScatterParts,  // unequal counts
  // Exchanges of the library's own, by the function that the caller has called.
  kCommCreate,
  kCommSplit,
  kOptimCreate,
  kOptimImport,
  kStateExport,
  kOuterCreate,
  kOuterImport,
  kOuterStep,  // the average of an outer step: a collective like any other
};
//
// Optimizer steps have no reduction and no root. There `root` tells hashes of parameter groups
// apart (pack_group_hashes), and `reduce` is a hash of state that was imported since the last step
// (0: none), so that a mismatch can be explained. Both are in `detail` as well.
struct OpSignature {
  OpKind kind = OpKind::kBarrier;
  uint16_t reduce = 0;  // ReduceOp, 0: none
  uint32_t dtype = 0;   // 0: none or mixed
  uint64_t count = 0;   // elements, all tensors together
  uint64_t tag = 0;
  int32_t root = -1;
  // Hash of everything else that ranks must agree on: counts, codec, plan parameters.
  uint32_t detail = 0;
  // Hash over this and all earlier collectives of the comm: a difference in an operation without
  // messages shows in the next one with messages. Point-to-point: over the tag, dtype and counts.
  uint64_t chain = 0;
  bool operator==(const OpSignature&) const = default;
};
static_assert(sizeof(OpSignature) == 40);
// "operation 3", or "send/recv 0 from rank 1 to rank 2" of the comm.
std::string name_of(const OpKey& key);
// Up to 7 groups have as many bits each as fit into 28, from bit 0, and their number stands in the
// upper 4 bits; more share all 28, and the number is 0.
int32_t pack_group_hashes(std::span<const uint64_t> groups);
// "all_reduce(sum, fp32, 1000 elements, tag 0)".
std::string describe(const OpSignature& signature);
// The text of a PROTOCOL error: two ranks gave one key to different operations.
std::string describe_mismatch(const OpKey& key, int32_t rank_a, const OpSignature& a,
                              int32_t rank_b, const OpSignature& b);

// Operations of this priority or a lower one work in the background: lanes of their own on devices
// that have such, and at least a small share of a wire that others keep busy.
inline constexpr int32_t kBackgroundPriority = -1000;
constexpr bool in_background(int32_t priority) { return priority <= kBackgroundPriority; }

struct OpDescriptor {
  OpKey key;
  OpSignature signature;
  int32_t priority = 0;
};

enum class MessageClass : uint8_t {
  kPayload,   // counted as payload
  kMetadata,  // scales, flags, norms: counted as header bytes
};

// A collective of the transport's own, between all ranks of the root comm.
struct NativeCall {
  OpKind kind = OpKind::kAllGather;  // kBroadcast, kReduceScatter, kAllReduce
  ReduceOp reduce{};                 // of the last two
  Dtype dtype = Dtype::kF32;
  uint64_t count = 0;  // elements of a rank's part (all-gather, reduce-scatter) or of the tensor
  int32_t root = -1;   // broadcast: rank in the root comm
};

// One message. Owned by the engine; `data` and the Transfer stay valid and unmoved until it is
// completed or its operation is cancelled.
struct Transfer {
  const OpDescriptor* op = nullptr;
  int32_t peer = -1;   // rank in the root comm
  uint32_t round = 0;  // with `segment`: identifies the message within the operation for one
                       // (source, destination)
  uint32_t segment = 0;
  // Links that match by order: how many of the operation's inputs have come before its group.
  uint32_t inputs = 0;
  bool is_send = false;
  MessageClass message_class = MessageClass::kPayload;
  void* data = nullptr;
  uint64_t bytes = 0;  // may be 0
  // One of the messages that a call of `native` from one memory to another stands for, which are
  // all in one group. Null: it goes on its own.
  const NativeCall* native = nullptr;
  const void* native_in = nullptr;
  void* native_out = nullptr;
  // Engine's own.
  void* owner = nullptr;
  uint32_t step = 0;
  // Transport's own.
  Transfer* next = nullptr;
  uint64_t scratch[4] = {};
};

// Bytes and messages of one peer and one comm epoch, as they crossed the transport. A message
// counts when it has been handed to (or taken from) the network completely.
struct TransferCounters {
  uint64_t payload_bytes_sent = 0, payload_bytes_received = 0;
  uint64_t header_bytes_sent = 0,
           header_bytes_received = 0;  // frame headers, trailers and metadata messages
  uint64_t service_bytes_sent = 0,
           service_bytes_received = 0;  // flow control; not attributed to an epoch: epoch 0
  uint64_t messages_sent = 0, messages_received = 0;
  TransferCounters& operator+=(const TransferCounters& o);
  // A message without frames: payload, or metadata among the headers.
  void add(const Transfer& transfer);
};

// What the engine hears. Called on the driving thread from inside poll, send, recv or issue; the
// engine only records it.
class TransferSink {
 public:
  virtual ~TransferSink() = default;
  // The transfer is finished; the transport no longer touches it or its memory. PROTOCOL:
  // signature, size or checksum does not fit.
  virtual void on_transfer(Transfer& transfer, Status status) noexcept = 0;
  // The transport can no longer reach a peer (PEER_LOST), met a broken frame (PROTOCOL) or a local
  // fault (TRANSPORT): the root comm fails.
  virtual void on_failure(int32_t peer, Status status) noexcept = 0;
};

class MessageTransport;
class QueueTransport;

// What both kinds have.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual const TransportCaps& caps() const = 0;
  // This transport, if it is of the kind.
  virtual MessageTransport* as_message_transport() { return nullptr; }
  virtual QueueTransport* as_queue_transport() { return nullptr; }

  // Bytes that one message costs beside its data: frame header and trailer.
  virtual uint64_t header_bytes(uint64_t message_bytes) const = 0;

  // This rank has reached the operation: its messages may be matched. A peer's message for the same
  // key with another signature fails the root comm as PROTOCOL, with both sides described, even if
  // no receive is posted. `op` stays valid until complete or cancel.
  virtual Status post_op(const OpDescriptor& op) = 0;
  // The operation has completed on this rank.
  virtual void complete(const OpDescriptor& op) = 0;
  // Drops every unfinished transfer of the operation, without on_transfer. On return none is
  // touched any more. Used only when the root comm has failed; messages may be left half sent.
  virtual void cancel(const OpDescriptor& op) = 0;

  // Whether the pair is linked. A transport inside a host may leave out peers of its connect, on
  // both sides alike.
  virtual bool reaches(int32_t peer) const {
    (void)peer;
    return true;
  }
  // One line per peer for reports: "tcp 127.0.0.1:4242".
  virtual std::string route(int32_t peer) const = 0;
  // Counters per comm epoch and peer. Threads: any.
  virtual TransferCounters counters(uint64_t comm, int32_t peer) const = 0;
  // The comm with this epoch has ended on this rank: it has no more operations, what it has joined
  // ends, and nobody asks for its counters. Its late frames may still come.
  virtual void leave(uint64_t comm) { (void)comm; }
  // Orderly end: pending writes are flushed until the deadline, peers learn that the end is
  // intended.
  virtual void close(Deadline deadline) = 0;
};

// Messages match by their keys. Errors arrive through the sink.
class MessageTransport : public Transport {
 public:
  MessageTransport* as_message_transport() final { return this; }

  virtual void send(Transfer& transfer) = 0;
  virtual void recv(Transfer& transfer) = 0;
  // All receives from `peer` up to and including `last_round` of the operation have been posted
  // with recv and have their memory: bulk senders may start. `largest` is the largest of these
  // messages in bytes, so that a transport can leave out READY frames that no sender waits for.
  virtual void ready(int32_t peer, const OpDescriptor& op, uint32_t last_round,
                     uint64_t largest) = 0;
};

// Messages match by the order of their groups.
class QueueTransport : public Transport {
 public:
  QueueTransport* as_queue_transport() final { return this; }

  // Sends and receives of one round, all at once. stream_ordered: queued on `lane` of `device`; the
  // engine records an event behind them and on_transfer is not used. Captured into a CUDA graph
  // (DeviceCaps::captures), they execute after each restart, with the transfers and their memory.
  // IN_PROGRESS: they are not queued yet; the engine issues the same group again, soon and before
  // any other, until they are or the root comm fails.
  virtual Status issue(std::span<Transfer* const> group, Device* device, uint32_t lane) = 0;
  // What cancel or close has begun is over. Until then the transport goes on with it when it is
  // polled, and what was cancelled may be touched. It bounds the time itself.
  virtual bool settled() const { return true; }

  // The rest is for stream-ordered ones.
  // The device whose lanes it queues messages on; nothing: any.
  virtual std::optional<DeviceId> device() const { return std::nullopt; }
  // All that was issued has executed, except what was captured into graphs.
  virtual bool idle() const { return true; }
  // Asked when all steps of the operation are done: PROTOCOL if what it has received was meant for
  // something else.
  virtual Status verify(const OpDescriptor& op) {
    (void)op;
    return ok_status();
  }
  // What was captured into a graph for the operation, known by the place of `op`. restart: it is
  // about to execute, for the operation that is there now. release_captured: it will not execute
  // any more.
  virtual void restart(const OpDescriptor& op) { (void)op; }
  virtual void release_captured(const OpDescriptor& op) { (void)op; }

  // Native collectives between some ranks of the root comm, or in another order. First each of them
  // asks what all are to know of it, equally long (`first`: the first of them); with that, in their
  // order, all join. The root comm fails if a rank cannot. Collective, like an operation of the
  // comm with this epoch.
  virtual Result<std::string> invite(bool first) {
    (void)first;
    return unsupported("transport \"{}\" has no native collectives", caps().name);
  }
  virtual Status join(uint64_t comm, int32_t rank, const std::vector<std::string>& invitations,
                      Driver& driver, Deadline deadline) {
    (void)comm, (void)rank, (void)invitations, (void)driver, (void)deadline;
    return unsupported("transport \"{}\" has no native collectives", caps().name);
  }
};

// Serves sockets, timers and mailboxes of one context.
class Poller {
 public:
  virtual ~Poller() = default;
  // Runs what is ready; if nothing is, waits at most wait_us for something (0: not at all). True if
  // anything ran or a wake has come.
  virtual bool poll(int64_t wait_us) = 0;
  // Whether poll would find anything, by a look at memory; nothing: only poll can tell. Cheap.
  virtual std::optional<bool> peek() const { return std::nullopt; }
  // Microseconds after which it has to be polled again without a wake: the longest wait of others.
  virtual int64_t poll_interval_us() const { return INT64_MAX; }
  // Ends a poll that waits, or the next one. Threads: any.
  virtual void wake() = 0;

  // The engine waits in one poller for all. What ends a wait of another poller ends that one too:
  // by wakes, or by a descriptor.
  //
  // From now on whatever ends a waiting poll here (wake, and messages that other threads put into
  // mailboxes) also wakes `other`, on which the engine waits; null: no longer, and no wake of the
  // old one is under way on return. Pollers whose events come from sockets alone need nothing.
  virtual void forward_wakes(Poller* other) { (void)other; }
  // The descriptor, always the same, that becomes readable when there is something to do after arm;
  // -1: there is none. Such a poller forwards no wakes.
  virtual int descriptor() const { return -1; }
  // Asked before the engine waits. False: there is something to do now, and it does not wait.
  virtual bool arm() { return true; }
  // Of the poller that is waited in: whether another one's descriptor ends a waiting poll from now
  // on (`on`), or does not any more. False: it cannot.
  virtual bool watch(int descriptor, bool on) {
    (void)descriptor, (void)on;
    return false;
  }
};

}  // namespace sotto
