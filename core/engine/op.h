// An operation: a plan that runs once, from the call that starts it to its status.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/base/status.h"
#include "core/engine/captured_ops.h"
#include "core/engine/driver_role.h"
#include "core/engine/run.h"
#include "core/iface/device.h"

namespace sotto {

class Channel;

// Figures that a comm sums over its operations. Threads: any.
struct OpTotals {
  std::atomic<uint64_t> payload_bytes_planned{0};
  std::atomic<uint64_t> header_bytes_planned{0};  // frame headers, trailers and metadata messages
  std::atomic<uint64_t> kernel_ns{0};
  std::atomic<uint64_t> completed{0};
  std::atomic<uint32_t> in_flight{0};  // operations, and inputs that the driver does not know yet
  std::atomic<uint32_t> callbacks{0};  // of its operations: due, or running
};

struct OpStats {
  int64_t launch_ns = 0;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int64_t kept_back_ns = 0;  // of that time nothing was to be done before a slice was let go
  uint64_t kernel_ns = 0;
  uint64_t payload_bytes_planned = 0;
  uint64_t header_bytes_planned = 0;
  // Threads have stood still for it in Engine::wait and the like, at most until its end; -1: a
  // stream waits for it, and the host does not know how long.
  int64_t exposed_ns = 0;
};

// What an operation's owner does when it has completed: on the driver, before waiters learn of it.
class OpHooks {
 public:
  virtual ~OpHooks() = default;
  // `status`: OK, NONFINITE (the plan's verdict was not to commit) or the failure; may be replaced
  // by a better one. `verdict`: the bytes of the plan's verdict slot, empty if it has none or the
  // operation failed.
  virtual void on_complete(Status& status, std::span<const std::byte> verdict) noexcept = 0;
  // Behind on_complete: figures of other operations that the user sees as this one are added.
  virtual void add_stats(OpStats& /*stats*/) const noexcept {}
};

using DoneFn = void (*)(void* user, int32_t status);

struct OpRequest {
  std::shared_ptr<PreparedPlan> plan;
  std::unique_ptr<Run> run;  // acquired from the plan, bound slots and descriptors filled in
  EventId after = 0;         // of the plan's device: what its steps come after; the engine's
  // Operations that it comes after. If one of them fails this one does.
  std::vector<OpRef> after_ops;
  std::shared_ptr<Channel> channel;
  std::shared_ptr<const std::vector<int32_t>> ranks;  // rank in the comm -> rank in the root comm
  std::shared_ptr<OpTotals> totals;
  std::shared_ptr<OpHooks> hooks;  // may be null
  // The plan's device: the operation is captured and does not run, but can be replayed (replay).
  std::shared_ptr<GraphCapture> capture;
  int64_t timeout_us = -1;  // without progress; negative: never
  int32_t priority = 0;
  DoneFn on_done = nullptr;
  void* user = nullptr;
  bool done_any_thread = false;
  bool waits = false;     // the caller will wait at once, and then drives itself
  bool admitted = false;  // Engine::admit has let the call pass that it is a part of
};

// One operation. Kept alive by shared_ptr: by its user, and by the engine until it has completed.
class Op final : public CapturedOp {
 public:
  Op() = default;
  ~Op();
  Op(const Op&) = delete;
  Op& operator=(const Op&) = delete;
  bool done() const { return done_.load(std::memory_order_acquire); }
  // on_done, if there is one, has returned too.
  bool settled() const { return done() && called_.load(std::memory_order_acquire); }
  // The result; IN_PROGRESS before completion.
  Status status() const;
  // As status, but IN_PROGRESS until it is settled: what threads outside of its callback see.
  Status outcome() const;
  OpStats stats() const;
  // Whose streams may wait for it.
  const std::shared_ptr<Device>& device() const { return request_.plan->device(); }

 private:
  friend class Channel;
  friend class Engine;
  friend class Executor;

  OpRequest request_;
  std::unique_ptr<std::atomic<bool>[]> arrived_;  // by input: Engine::arrive was called
  Status failure_;
  OpStats stats_;
  Status result_;  // written before done_
  std::atomic<bool> done_{false};
  std::atomic<bool> called_{true};         // no callback is to come, or running
  std::atomic<int64_t> waited_ns_{0};      // by threads, one after the other
  std::atomic<bool> stream_waits_{false};  // on a device that goes on by itself
  std::weak_ptr<Op> self_;
};
}  // namespace sotto
