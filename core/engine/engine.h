// Runs plans. One engine per context (rank). Steps run as soon as their predecessors are done;
// sends and receives go to the transport, kernels and copies to the device.
//
// Who drives: exactly one thread at a time holds the driver's role and does all the work. A thread
// that waits for an operation takes the role itself; the context's progress thread has it only
// while nobody waits. Everything that is marked "driver" below runs under that role, so engine,
// transports and control planes need no locks of their own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/base/clock.h"
#include "core/base/object_pool.h"
#include "core/base/status.h"
#include "core/engine/device_queues.h"
#include "core/engine/op.h"
#include "core/engine/scheduler.h"
#include "core/engine/trace.h"
#include "core/iface/device.h"
#include "core/iface/rendezvous.h"
#include "core/iface/transport.h"

namespace sotto {

class Channel;
class Engine;

struct EngineOptions {
  const Clock* clock = &Clock::monotonic();
  uint32_t max_ops = 1024;
  bool progress_thread = true;
  std::string trace;  // where a time line is written, as Trace says; empty: nowhere
};

class Engine final : public Driver {
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
    RoleLock role(*this);
    return f(static_cast<Driver&>(*this));
  }
  // Only inside drive.
  bool run_until(const std::function<bool()>& done, Deadline deadline) override;

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
  // Waits until done() holds; it is evaluated with and without locks held, so it only reads
  // atomics.
  bool wait_until(const std::function<bool()>& done, int64_t timeout_us);

  // Runs f on the driver soon, and returns when it has run. Threads: any.
  void run_on_driver(std::function<void()> f);

  void add_channel(Channel* channel);     // driver
  void remove_channel(Channel* channel);  // driver

 private:
  friend class Channel;

  struct Completion {
    Transfer* transfer;
    Status status;
  };

  // Holds the driver's role for its lifetime.
  class RoleLock {
   public:
    explicit RoleLock(Engine& engine);
    ~RoleLock();
    bool nested() const { return nested_; }

   private:
    Engine& engine_;
    bool nested_ = false;  // this thread had the role before
  };

  // Driving (engine.cc).
  bool progress();
  void block(int64_t wait_us);
  bool claimed();  // a thread wants the driver's role
  void wake();
  bool take_submissions();
  bool serve_pollers();
  void progress_thread_main() noexcept;
  void leave_role();            // under mutex_
  bool background_due() const;  // under mutex_
  void run_callbacks();
  void check_deadlines();
  bool channels_failed();

  // What hands messages that are ready to the transport.
  auto poster(Op& op) {
    return [this, &op](uint32_t step) { post_transfer(op, step); };
  }

  // Executing (execute.cc), driver.
  void admit(const OpRef& op);
  void announce_receives(Op& op);
  void await_stream(Op& op);
  void post_transfer(Op& op, uint32_t step);
  void issue_groups(Channel& channel);
  bool issue_again();
  Status issue(Channel& channel, Op& op, uint32_t group);
  bool run_ready();
  void run_ready_on(const DeviceQueue* queue);
  void execute(Op& op, uint32_t step);
  void after_issue(Op& op, uint32_t step);
  void device_failed(Op& op, const Status& status);
  void step_done(Op& op, uint32_t step);
  void note_issue(Run& run, uint32_t step);
  bool take_completions();
  bool poll_events();
  void call_ended(Op& op, uint32_t step, const Status& device);

  // Replaying (replay.cc), driver.
  Status check_replay(const Op& op);
  Status await_earlier(const Op& op);
  bool launches_ended();
  void forget_replay(Op& op);
  void launch_ended(Op& op);
  void fail_replay(Op& op, const Status& status);

  // Ending (finish.cc), driver.
  void finish(Op& op);
  void start_undo(Op& op, bool all_ran);
  void complete(Op& op, Status status);
  void propose_failure(Channel& channel, const FailureCause& cause);
  void fail_channel(Channel& channel, const FailureCause& cause);
  void fail_op(Op& op, const Status& status);
  void settle_failed(Op& op);
  void finish_committing(Op& op);
  FailureCause stall_cause(const Op& op, int64_t stalled_ns) const;
  void drop_completions(const Op& op);

  EngineOptions options_;
  std::shared_ptr<ObjectPool> pool_ = std::make_shared<ObjectPool>();
  std::unique_ptr<Trace> trace_;  // null: nobody wants one
  std::vector<std::unique_ptr<Backend>> backends_;
  Poller* blocking_ = nullptr;  // also under mutex_
  std::vector<Channel*> channels_;
  Scheduler scheduler_;
  DeviceQueues queues_;
  std::vector<Op*> replayed_;  // recorded, a launch of whose graph is awaited
  std::vector<Completion> completions_, completions_now_;
  std::vector<OpRef> spare_;  // empty; its memory is what submitted_ gets next
  int64_t last_poll_ns_ = 0;
  int64_t next_deadline_check_ns_ = 0;

  // Shared by threads, under mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;  // threads that want the role or wait for an operation
  std::condition_variable parked_;   // the progress thread, while there is nothing for it to do
  int64_t left_ns_ = 0;              // when the role was last given up
  bool driving_ = false;
  std::thread::id driver_;  // who, while driving_
  uint32_t waiters_ = 0;    // threads that want the role or sleep until an operation ends
  uint32_t claims_ = 0;     // threads that want the role for something else than waiting
  bool stop_ = false;
  uint32_t ops_in_flight_ = 0;
  std::vector<OpRef> submitted_;
  std::vector<std::function<void()>> tasks_;
  std::vector<OpRef> callbacks_;
  std::atomic<bool> inbox_{false};  // submitted_ or tasks_ is not empty
  std::thread thread_;
};

// The engine's side of a root comm: its transport and control plane, its operations, its first
// failure.
class Channel final : public TransferSink,
                      public ControlListener,
                      public std::enable_shared_from_this<Channel> {
 public:
  explicit Channel(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  ~Channel() override;

  // Driver; once.
  void attach(std::unique_ptr<ControlPlane> control);
  void attach(std::unique_ptr<Transport> transport);
  Transport* transport() const { return transport_.get(); }
  ControlPlane* control() const { return control_.get(); }
  int32_t rank() const { return control_ == nullptr ? 0 : control_->rank(); }  // in the root comm
  Engine& engine() const { return *engine_; }

  // The first cause; OK while healthy. Threads: any.
  Status failure() const;
  FailureCause cause() const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // Fails the root comm on all ranks. Threads: any; returns when the first cause is known here,
  // which takes the control plane a fraction of a second at most.
  void abort(const FailureCause& cause);
  // A recorded operation will not be replayed any more. Threads: any.
  void unrecord(const Run& run);
  // Ends connections in order, within the time; within a fraction of a second if the comm has
  // failed. Threads: any, once, with no operation in flight.
  void close(int64_t timeout_us);

  // TransferSink, ControlListener: driver.
  void on_transfer(Transfer& transfer, Status status) noexcept override;
  void on_failure(int32_t peer, Status status) noexcept override;
  void on_control_failure(const FailureCause& cause) noexcept override;

 private:
  friend class Engine;
  struct Group {
    Op* op;
    uint32_t index;
  };

  std::shared_ptr<Engine> engine_;
  std::unique_ptr<ControlPlane> control_;
  std::unique_ptr<Transport> transport_;
  std::vector<OpRef> ops_;          // in flight, in order of start
  std::deque<Group> groups_;        // by_order: groups not yet issued, in order
  std::vector<Transfer*> issuing_;  // of the first one, while the transport has it in progress
  uint32_t replayed_messages_ = 0;  // operations in replayed_ that have messages
  std::vector<std::pair<FailureCause, bool>> pending_failures_;  // bool: decided for all ranks
  bool proposed_ = false;  // the control plane has a cause from here, and will decide soon
  std::atomic<bool> failed_{false};  // failure_ has been written
  mutable std::mutex mutex_;         // guards failure_
  FailureCause failure_;
};

}  // namespace sotto
