// Starts operations and waits for them. One engine per context (rank).
//
// Everything that is marked "driver" runs under the driver's role (driver_role.h), one thread at a
// time, so the executor, transports and control planes need no locks of their own. What the driver
// does is in executor.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "core/base/clock.h"
#include "core/base/object_pool.h"
#include "core/base/status.h"
#include "core/engine/channel.h"
#include "core/engine/driver_role.h"
#include "core/engine/op.h"
#include "core/iface/rendezvous.h"

namespace sotto {

class Executor;
class Trace;

struct EngineOptions {
  const Clock* clock = &Clock::monotonic();
  uint32_t max_ops = 1024;
  bool progress_thread = true;
  int progress_nice = 0;  // niceness of that thread
  int64_t spin_us = 0;    // microseconds that a waiting thread polls before it sleeps
  // stream_after blocks streams where the host has work left for an operation.
  bool block_streams = false;
  std::string trace;  // where a time line is written, as Trace says; empty: nowhere
};

class Engine final : public Driver, public std::enable_shared_from_this<Engine> {
 public:
  explicit Engine(EngineOptions options);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Clock& clock() const override { return *options_.clock; }
  // For what every operation needs anew, its hooks for example. Threads: any.
  ObjectPool& pool() const { return *pool_; }

  // Takes a backend, which lives as long as the engine, and serves its poller, as Pollers::add
  // says. Driver.
  void add_backend(std::unique_ptr<Backend> backend, bool blocking);

  // Runs f as the driver. Threads: any; at once if this thread is the driver.
  template <class F>
  auto drive(F&& f) {
    DriverRole::Lock lock(role_);
    return f(static_cast<Driver&>(*this));
  }
  // Only inside drive.
  bool run_until(const std::function<bool()>& done, Deadline deadline) override {
    return role_.run_until(done, deadline);
  }

  // ---- Operations ----

  // Waits until fewer than max_ops are in flight. BUSY: `may_block` is false or the time is over.
  // What starts several operations asks first and marks them as admitted, so that no later one is
  // refused. Threads: any.
  Status admit(int64_t timeout_us, bool may_block);
  // Starts an operation, which is admitted first if it is not marked so. Threads: any. Operations
  // of one channel start in the order of these calls.
  Result<OpRef> start(OpRequest request, bool may_block);

  // An input of the operation (PlanBuilder::await) has arrived. It is there behind `event` of the
  // operation's device, which is the engine's from now on (0: it is there now), in `memory`, by
  // slot (empty: where it was bound). In any order; what needs the input runs at once, also while
  // others are missing. No time-out counts before the last one has arrived. INVALID_ARGUMENT: no
  // such input or as many slots, or an event of a device that has none; INVALID_STATE: it has
  // arrived before, or the operation has ended. Then the event is not the engine's. Threads: any.
  Status arrive(const OpRef& op, uint32_t input, EventId event, std::span<void* const> memory);

  // A captured operation runs once more: with the next launch of its graph, which is the caller's
  // to make and must not have been made. `bind` fills in bound slots and scalars; its refusal
  // changes nothing. First waits until the messages of what was called before on the channel are
  // through, within the operation's time. INVALID_STATE: not captured, or launched otherwise
  // meanwhile; BUSY: in flight, or the time is over. Threads: any.
  Status replay(const OpRef& op, const std::function<Status(Run&, OpHooks*)>& bind);
  // IN_PROGRESS, or the operation's result, once its callback has returned. test makes some
  // progress if no thread drives.
  Status test(const OpRef& op);
  Status wait(const OpRef& op, int64_t timeout_us);
  // Something of the trainer's own in the time line, if there is one. Threads: any.
  void trace_span(std::string_view name, int64_t begin_ns, int64_t end_ns);
  // What is queued on a stream of the operation's device later starts after the operation. Waits
  // until all of the operation is queued on the device or, if the host has to do the rest of it
  // (messages by TCP), until it has; with block_streams the stream waits in place of the thread.
  // INVALID_STATE: in a callback, where neither is possible. Threads: any.
  Status stream_after(const OpRef& op, void* stream);
  // Index of the lowest completed op, null entries skipped; IN_PROGRESS when the time is over.
  Result<size_t> wait_any(std::span<const OpRef> ops, int64_t timeout_us);
  // Some progress, waiting at most timeout_us (negative: without limit) for something to happen;
  // runs callbacks that are due.
  void poll(int64_t timeout_us);
  // Of operations that have ended: runs the callbacks that are due, and returns when those that run
  // on other threads have returned. Not from callbacks.
  void finish_callbacks(const OpTotals& totals);
  // As DriverRole says.
  bool wait_until(const std::function<bool()>& done, int64_t timeout_us) {
    return role_.wait_until(done, timeout_us);
  }

  // ---- Channels. Threads: any ----

  // Served as long as it lives.
  std::shared_ptr<Channel> make_channel();
  // Fails the root comm on all ranks; returns when the first cause is known here, which takes the
  // control plane a fraction of a second at most.
  void abort(Channel& channel, const FailureCause& cause);
  // Ends connections in order, within the time; within a fraction of a second if the comm has
  // failed. Once, with no operation in flight.
  void close(Channel& channel, int64_t timeout_us);
  // A captured operation will not be replayed any more.
  void release_captured(Channel& channel, const Run& run);

 private:
  void run_callbacks();  // threads: any
  // The operation has ended: returns when its callback has returned (true) or the deadline passed.
  bool await_callback(const Op& op, Deadline deadline);

  EngineOptions options_;
  std::shared_ptr<ObjectPool> pool_ = std::make_shared<ObjectPool>();
  const std::unique_ptr<Trace> trace_;  // null: none is wanted
  const std::unique_ptr<Executor> executor_;
  DriverRole role_;
};

}  // namespace sotto
