// A comm: an ordered set of ranks, and the operations on it.
//
// Threads: create, split, start and exchange are called by one thread at a time per comm; the rest
// by any.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/engine/engine.h"
#include "core/group/context.h"
#include "core/group/parts.h"
#include "core/group/standing.h"
#include "core/iface/rendezvous.h"
#include "core/plan/collectives.h"
#include "core/plan/levels.h"

namespace sotto {

struct CommConfig {
  int32_t rank = 0;
  int32_t size = 0;  // 0: rank and size from the environment
  std::optional<UniqueId> id;
  std::string transport;   // empty or "auto": SOTTO_TRANSPORT
  int64_t timeout_us = 0;  // 0: SOTTO_TIMEOUT_US; negative: no limit
  ExchangeFn exchange;     // the caller's all-gather, instead of an id
  // A communicator of the transport's own library, lent by the caller (Backend::adopt); null: none.
  void* native_comm = nullptr;
};

struct CallOptions {
  uint64_t tag = 0;
  int64_t timeout_us = 0;  // 0: the comm's; negative: never
  int32_t priority = 0;
  bool no_block = false;
  bool admitted = false;  // Engine::admit has let the call pass that it is a part of
  DoneFn on_done = nullptr;
  void* user = nullptr;
  bool done_any_thread = false;
  bool waits = false;  // the caller waits for the operation at once
  // Operations of the context that it comes after: it begins when they have ended, and fails with
  // the first of them that fails. Of a collective they are collectives of the same comm or its
  // root's, which end alike on all ranks; if a local one fails, the root comm fails.
  std::vector<OpRef> after;
  // Stream of the caller, on a device that has them: the operation comes after what is queued on it
  // now. Empty: after nothing.
  std::optional<void*> stream;
};

// One collective or point-to-point call: request and memory. in and out have request.counts.size()
// entries.
struct Call {
  CollectiveRequest request;
  SmallVector<void*> in, out;
  uint64_t tag = 0;
  std::shared_ptr<Device> device;  // where in and out are; null: the context's
  // What other ranks and messages take it for, if not for the request's own kind.
  std::optional<OpKind> service;
};

// What a root comm and its splits share. The connections end when the last of them is gone.
struct RootComm {
  std::shared_ptr<Context> context;
  Standing standing;
  std::shared_ptr<Channel> channel;
  std::string transport;
  MessageSizes sizes;                      // the segments agreed by all ranks
  int64_t timeout_us = 0;                  // negative: no limit
  std::vector<uint64_t> hosts;             // by rank: host_number
  Hierarchy hierarchy = Hierarchy::kFlat;  // SOTTO_HIERARCHY, the same on all ranks
  ~RootComm();
};

class Comm : public std::enable_shared_from_this<Comm> {
 public:
  static Result<std::shared_ptr<Comm>> create(const std::shared_ptr<Context>& context,
                                              CommConfig config);
  ~Comm();

  int32_t rank() const { return rank_; }
  int32_t size() const { return static_cast<int32_t>(ranks_->size()); }
  uint64_t epoch() const { return epoch_; }
  const std::string& transport() const { return root_->transport; }
  int64_t timeout_us() const { return root_->timeout_us; }
  const MessageSizes& sizes() const { return root_->sizes; }  // the same on all ranks
  // By rank of this comm: the index of its host, from 0 in the order of the lowest rank of each.
  std::vector<int32_t> hosts() const;
  // Of collectives: the root comm's hierarchy; one level where hosts of a split are uneven.
  const Levels& levels() const { return levels_.collectives; }
  // Those of the transport that are between the ranks of this comm.
  NativeCollectives native() const { return native_; }
  const std::shared_ptr<Context>& context() const { return root_->context; }
  Engine& engine() const { return *root_->context->engine(); }

  // color < 0: no comm for this rank (null).
  Result<std::shared_ptr<Comm>> split(int32_t color, int32_t key);

  // The same ranks with numbers, signatures and point-to-point counters of their own, so that its
  // operations can go on beside those of this comm. Nothing is sent: every rank makes its
  // duplicates of a comm in the same order, and its epoch follows from that. It has the root comm's
  // transport and fails with it. Native collectives stay with the comms that joined them: here
  // messages are sent instead. Over a transport that matches by order the calls of all comms of a
  // root have one order, the same on all ranks, also those of duplicates. Threads: as create, for
  // this comm.
  std::shared_ptr<Comm> duplicate();
  // This rank by itself: a comm for what needs no other rank. Nothing is sent. Threads: as create,
  // for this comm.
  std::shared_ptr<Comm> alone();

  // INVALID_ARGUMENT: messages of operations on the device cannot go over the links of this rank.
  Status takes(const DeviceCaps& device) const;

  // Starts one call, or all calls of a group, on one device, as one operation.
  Result<OpRef> start(Call call, const CallOptions& options);
  Result<OpRef> start_group(std::span<Call> calls, const CallOptions& options);

  // The executable plan of calls, which are on one device, from a cache. Nothing is sent. What
  // requests have of the comm is filled in: sizes of messages, native collectives, levels.
  Result<std::shared_ptr<PreparedPlan>> prepare(std::span<Call> calls);
  // Lowers any plan for this comm's links and a device. scratch: as PreparedPlan::make.
  Result<std::shared_ptr<PreparedPlan>> prepare(
      LogicalPlan plan, const std::shared_ptr<Device>& device,
      std::shared_ptr<ScratchPool> scratch = nullptr) const;

  // Starts a prepared plan of one descriptor as the next collective of this comm. `bind` fills the
  // bound slots. The signature's chain is filled in here. capture: the plan's device, which
  // makes it part of a graph; UNSUPPORTED if messages need the host.
  Result<OpRef> launch(std::shared_ptr<PreparedPlan> plan, OpSignature signature,
                       const std::function<void(Run&)>& bind, std::shared_ptr<OpHooks> hooks,
                       const CallOptions& options, std::shared_ptr<GraphCapture> capture = nullptr);

  // A recorded operation is the next collective of this comm, with the signature, as
  // Engine::replay says. Other ranks may call it.
  Status replay(const OpRef& op, OpSignature signature,
                const std::function<Status(Run&, OpHooks*)>& bind);

  // Starts a plan without messages, of which other ranks learn nothing.
  Result<OpRef> launch_local(std::shared_ptr<PreparedPlan> plan,
                             const std::function<void(Run&)>& bind, std::shared_ptr<OpHooks> hooks,
                             const CallOptions& options);

  // Waits for an operation to its end. A rank's own error, or the operation's.
  Status finish(const Result<OpRef>& op);
  // start and finish.
  Status run(Call call);
  // All-gather of equally long blobs, in rank order; an ordinary collective. `service` says what
  // for.
  Result<std::vector<std::string>> exchange(const std::string& mine,
                                            OpKind service = OpKind::kSetup);
  Status barrier();

  // Fails the root comm with ABORTED on every rank.
  void abort(const std::string& reason);
  Status failure() const { return root_->channel->failure(); }
  // Waits for operations in flight, at most the comm's timeout; fails those left. Returns the first
  // error.
  Status drain();

  // Those of what was made by duplicate and alone count here too.
  CommCounters counters() const;
  std::string report_json(const std::string& kind) const;  // "all", "counters", "routes", "waiting"

 private:
  Comm(std::shared_ptr<RootComm> root, std::vector<int32_t> ranks, int32_t rank, uint64_t epoch);

  struct CachedPlan {
    std::vector<CollectiveRequest> requests;
    std::shared_ptr<PreparedPlan> plan;  // names the device
  };

  std::shared_ptr<Comm> make_part(std::vector<int32_t> ranks, int32_t rank, uint64_t number,
                                  uint64_t color);
  // With a rank of the root comm: of this comm and its parts.
  TransferCounters moved(int32_t root_rank) const;
  Status join(OpKind service);
  OpDescriptor next_descriptor(OpSignature signature, int32_t priority);
  OpDescriptor point_to_point_descriptor(const CollectiveRequest& request, OpSignature signature,
                                         int32_t priority);
  Result<OpRef> submit(std::shared_ptr<PreparedPlan> plan, std::unique_ptr<Run> run,
                       std::shared_ptr<OpHooks> hooks, const CallOptions& options,
                       std::shared_ptr<GraphCapture> capture = nullptr);

  std::shared_ptr<RootComm> root_;
  std::shared_ptr<const std::vector<int32_t>> ranks_;  // rank here -> rank in the root comm
  int32_t rank_;
  uint64_t epoch_;
  std::shared_ptr<OpTotals> totals_ = std::make_shared<OpTotals>();
  NativeCollectives native_ = 0;
  struct {
    Levels collectives;
    Levels exchanges;  // which have no sums: by hosts alone
  } levels_;

  // Of the collectives so far; an operation that was refused is none.
  struct Numbering {
    uint64_t next = 0;
    uint64_t chain = 0;
  };
  Numbering numbering_;
  uint32_t splits_ = 0, duplicates_ = 0;  // the same on all ranks
  std::shared_ptr<Parts> parts_ = std::make_shared<Parts>();
  std::shared_ptr<Parts> part_of_;  // of the comm that has made this one; null: it is no part
  std::map<int32_t, uint32_t> sent_to_, received_from_;  // point-to-point operations per peer
  std::list<CachedPlan> cache_;                          // most recent first
  std::vector<std::shared_ptr<ScratchPool>> scratch_;    // of cached plans, one per device
};

// Signature of a request, without chain.
OpSignature signature_of(const CollectiveRequest& request, uint64_t tag);

}  // namespace sotto
