// Runs plans. One engine per context (rank). Steps run as soon as their predecessors are done;
// sends and receives go to the link of their peer, kernels and copies to the device.
//
// Everything that is marked "driver" runs under the driver's role (driver_role.h), one thread at a
// time, so engine, transports and control planes need no locks of their own. Which step is next and
// how an operation ends is the scheduler's to decide; what was issued to devices is known to the
// queues.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/object_pool.h"
#include "core/base/status.h"
#include "core/engine/captured_ops.h"
#include "core/engine/channel.h"
#include "core/engine/device_queues.h"
#include "core/engine/driver_role.h"
#include "core/engine/op.h"
#include "core/engine/scheduler.h"
#include "core/engine/trace.h"
#include "core/iface/device.h"
#include "core/iface/rendezvous.h"
#include "core/iface/transport.h"

namespace sotto {

struct EngineOptions {
  const Clock* clock = &Clock::monotonic();
  uint32_t max_ops = 1024;
  bool progress_thread = true;
  std::string trace;  // where a time line is written, as Trace says; empty: nowhere
};

class Engine final : public Driver, private DriverWork {
 public:
  explicit Engine(EngineOptions options);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Clock& clock() const override { return *options_.clock; }
  // For what every operation needs anew, its hooks for example. Threads: any.
  ObjectPool& pool() const { return *pool_; }

  // Takes a backend, which lives as long as the engine, and serves its poller. The poller of the
  // backend added last with `blocking` is the one that is waited on. Driver.
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

  // Starts an operation. BUSY if max_ops are in flight and `may_block` is false or the request's
  // time is over. Threads: any. Operations of one channel start in the order of these calls.
  Result<OpRef> start(OpRequest request, bool may_block);

  // A recorded operation runs once more: with the next launch of its graph, which is the caller's
  // to make and must not have been made. `bind` fills in bound slots and scalars; its refusal
  // changes nothing. First waits until the messages of what was called before on the channel are
  // through, within the operation's time. INVALID_STATE: not recorded, or launched otherwise
  // meanwhile; BUSY: in flight, or the time is over. Threads: any.
  Status replay(const OpRef& op, const std::function<Status(Run&, OpHooks*)>& bind);
  // IN_PROGRESS, or the operation's result. test makes some progress if nobody drives.
  Status test(const OpRef& op);
  Status wait(const OpRef& op, int64_t timeout_us);
  // What is queued on a stream of the operation's device later starts after the operation. Does not
  // wait for it. Threads: any.
  Status stream_after(const OpRef& op, void* stream);
  // Index of the lowest completed op, null entries skipped; IN_PROGRESS when the time is over.
  Result<size_t> wait_any(std::span<const OpRef> ops, int64_t timeout_us);
  // Some progress, waiting at most timeout_us (negative: without limit) for something to happen;
  // runs callbacks that are due.
  void poll(int64_t timeout_us);
  // As DriverRole says.
  bool wait_until(const std::function<bool()>& done, int64_t timeout_us) {
    return role_.wait_until(done, timeout_us);
  }
  void run_on_driver(const std::function<void()>& f) { role_.run_on_driver(f); }

  void add_channel(Channel* channel);     // driver
  void remove_channel(Channel* channel);  // driver

 private:
  friend class Channel;

  struct Completion {
    Transfer* transfer;
    Status status;
  };

  // DriverWork.
  bool progress() override;
  void block(int64_t wait_us) override;
  void wake() override;

  // What progress does (engine.cc), driver.
  bool take_inbox();
  bool serve_pollers();
  bool channels_failed();
  bool poll_devices();
  bool poll_captured();
  bool issue_again();
  bool run_ready();
  bool take_completions();
  bool check_deadlines();
  void run_callbacks();  // threads: any

  // What hands messages that are ready to the transport.
  auto poster(Op& op) {
    return [this, &op](uint32_t step) { post_transfer(op, step); };
  }

  // Steps of operations (execute.cc), driver.
  void admit(const OpRef& op);
  void await_stream(Op& op);
  void post_transfer(Op& op, uint32_t step);
  void issue_groups(Channel& channel);
  Status issue(QueueTransport& transport, Op& op, uint32_t group,
               std::vector<Transfer*>& transfers);
  void execute(Op& op, uint32_t step);
  void after_issue(Op& op, uint32_t step);
  void step_done(Op& op, uint32_t step);
  void call_ended(Op& op, uint32_t step, const Status& device);
  void note_issue(Run& run, uint32_t step);
  void device_failed(Op& op, const Status& status);

  // How operations end (finish.cc), driver.
  void finish(Op& op);
  void start_undo(Op& op, bool all_ran);
  void complete(Op& op, Status status);
  void propose_failure(Channel& channel, const FailureCause& cause);
  void fail_channel(Channel& channel, const FailureCause& cause);
  void fail_op(Op& op, const Status& status);
  void settle_failed(Op& op);
  void finish_committing(Op& op);
  void drop_completions(const Op& op);

  // Recorded ones (replay.cc), driver.
  Status check_replay(const Op& op);
  Status await_earlier(const Op& op);
  void forget_replay(Op& op);

  EngineOptions options_;
  std::shared_ptr<ObjectPool> pool_ = std::make_shared<ObjectPool>();
  std::unique_ptr<Trace> trace_;  // null: none is wanted
  std::vector<std::unique_ptr<Backend>> backends_;
  std::atomic<Poller*> blocking_{nullptr};
  std::vector<Channel*> channels_;
  Scheduler scheduler_;
  DeviceQueues queues_;
  CapturedOps captured_;
  std::vector<Completion> completions_, completions_now_;
  std::vector<OpRef> spare_;  // empty; the inbox gets its memory
  int64_t last_poll_ns_ = 0;
  int64_t next_deadline_check_ns_ = 0;
  DriverRole role_;
};

}  // namespace sotto
