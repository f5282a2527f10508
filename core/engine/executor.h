// What the driver does: runs the steps of plans, ends operations and channels. Steps run as soon as
// their predecessors are done; sends and receives go to the link of their peer, kernels and copies
// to the device. Which step is next and how an operation ends is the scheduler's to decide; what
// was issued to devices is known to the queues.
//
// Threads: the driver, but for the constructor, the destructor and wake.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/engine/captured_ops.h"
#include "core/engine/channel.h"
#include "core/engine/channel_list.h"
#include "core/engine/completions.h"
#include "core/engine/device_queues.h"
#include "core/engine/driver_role.h"
#include "core/engine/op.h"
#include "core/engine/pollers.h"
#include "core/engine/scheduler.h"
#include "core/engine/stream_orders.h"
#include "core/engine/trace.h"

namespace sotto {

class Executor final : public DriverWork {
 public:
  // `role`: whose driver this is. `trace`: of steps and operations; null: none is wanted. spin_us:
  // as Pollers says.
  Executor(const Clock& clock, DriverRole& role, Trace* trace, int64_t spin_us);
  // Writes the time line.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // DriverWork.
  bool progress() override;
  void block(int64_t wait_us) override;
  void wake() override { pollers_.wake(); }

  Pollers& pollers() { return pollers_; }
  Completions& completions() { return completions_; }
  // Those that are served.
  ChannelList& channels() { return channels_; }

  // Takes what other threads have handed over: admits operations, runs tasks.
  bool take_inbox();
  // As Engine says; `max_ops`: the limit of operations in flight.
  Status replay(Op& op, const std::function<Status(Run&, OpHooks*)>& bind, uint32_t max_ops);
  // `nested`: in a callback, where the driver is in the middle of something. IN_PROGRESS: it is not
  // ordered, but when `order` is done it can be; not unless `may_wait`, for which the stream is
  // blocked.
  Status stream_after(StreamOrder& order, bool nested, bool may_wait);
  // What a rank has found, for all ranks to agree on.
  void propose_failure(Channel& channel, const FailureCause& cause);
  // The channel has failed: ends its operations.
  void fail_channel(Channel& channel, const FailureCause& cause);

 private:
  // What progress does (executor.cc).
  bool channels_failed();
  bool poll_devices();
  bool issue_again();
  bool begin_waiting();
  bool run_ready();
  bool take_completions();
  bool check_deadlines();

  // What hands messages that are ready to the transport.
  auto poster(Op& op) {
    return [this, &op](uint32_t step) { post_transfer(op, step); };
  }

  // Steps of operations (execute.cc).
  void admit(const OpRef& op);
  void begin(Op& op);
  void input_arrived(Op& op, const Handover& item);
  void enter_groups(Op& op);
  void open_input(Op& op, uint32_t input, EventId event);
  void post_transfer(Op& op, uint32_t step);
  void issue_groups(Channel& channel);
  Status issue(QueueTransport& transport, Op& op, uint32_t group,
               std::vector<Transfer*>& transfers);
  void execute(Op& op, uint32_t step);
  void after_issue(Op& op, uint32_t step);
  void step_done(Op& op, uint32_t step);
  void call_ended(Op& op, uint32_t step, const Status& device);
  void device_failed(Op& op, const Status& status);

  // How operations end (finish.cc).
  void finish(Op& op);
  void start_undo(Op& op, bool all_ran);
  void complete(Op& op, Status status);
  void fail_op(Op& op, const Status& status);
  void settle_failed(Op& op);

  // Captured ones (replay.cc).
  void forget_replay(Op& op);

  const Clock& clock_;
  DriverRole& role_;
  Trace* const trace_;  // null: none is wanted
  Pollers pollers_;
  ChannelList channels_;
  Scheduler scheduler_;
  DeviceQueues queues_;
  CapturedOps captured_;
  Completions completions_;
  std::vector<Handover> spare_;  // empty; the inbox gets its memory
  std::vector<OpRef> waiting_;   // admitted, and behind other operations
  StreamOrders stream_orders_;
  int64_t now_ns_ = 0;  // when the driver last looked at the clock, plus kernels that it ran since
  int64_t next_deadline_check_ns_ = 0;
};

}  // namespace sotto
