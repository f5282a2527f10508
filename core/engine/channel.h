// The engine's side of a root comm: its links and control plane, its operations, its first failure.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/completions.h"
#include "core/engine/links.h"
#include "core/engine/op.h"
#include "core/iface/rendezvous.h"
#include "core/iface/transport.h"

namespace sotto {

class Engine;

class Channel final : public TransferSink,
                      public ControlListener,
                      public std::enable_shared_from_this<Channel> {
 public:
  // Made by Engine::make_channel. They live as long as the channel. `number`: the lowest that no
  // other channel of the engine has; `lane_groups`: as LinkTable says.
  Channel(std::shared_ptr<Engine> engine, Completions& completions, uint32_t number,
          std::shared_ptr<OrderedIssue> lane_groups)
      : engine_(std::move(engine)),
        completions_(completions),
        number_(number),
        lane_groups_(std::move(lane_groups)) {}
  ~Channel() override;  // driver

  // Driver; once.
  void attach(std::unique_ptr<ControlPlane> control);
  // A transport, and the ranks that it reaches.
  void attach(std::unique_ptr<Transport> transport, std::span<const int32_t> peers);
  LinkTable& links() { return links_; }
  const LinkTable& links() const { return links_; }
  ControlPlane* control() const { return control_.get(); }
  uint32_t number() const { return number_; }
  int32_t rank() const { return control_ == nullptr ? 0 : control_->rank(); }  // in the root comm
  Engine& engine() const { return *engine_; }
  // In flight, in the order of start. Driver.
  std::span<const OpRef> ops() const { return ops_; }

  // The first cause; OK while healthy. Threads: any.
  Status failure() const;
  FailureCause cause() const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // TransferSink, ControlListener: driver.
  void on_transfer(Transfer& transfer, Status status) noexcept override;
  void on_failure(int32_t peer, Status status) noexcept override;
  void on_control_failure(const FailureCause& cause) noexcept override;

 private:
  friend class Engine;
  friend class Executor;
  struct Failure {
    FailureCause cause;
    bool decided;  // for all ranks
  };

  // What this rank has found, for the engine to propose. `peer`: -1: not known.
  void found(const Status& status, int32_t peer = -1) {
    found_.push_back({{status.code(), peer, status.text()}, false});
  }
  // Proposes a cause to the control plane. What counts, if that is known at once.
  std::optional<FailureCause> propose(const FailureCause& cause);
  // It is the first cause. False: there is one already.
  bool set_failure(const FailureCause& cause);

  // It has failed, or is about to.
  bool lost() const { return failed() || (control_ != nullptr && control_->failure().has_value()); }
  // Ends connections in order, within the time; once, with no operation in flight.
  void close(Deadline deadline);

  // The operation's descriptors at all links.
  Status post(const Run& run);
  Status verify(const Run& run);
  void complete(const Run& run);
  void cancel(const Run& run);
  // No link touches any more what was cancelled, and links that were closed have ended.
  bool settled() const;
  void restart(const Run& run);
  void release_captured(const Run& run);
  // Those of the operation's groups whose inputs are there, behind those of others and all groups
  // of the operations that it comes after; and of a graph that is launched.
  void add_groups(Op& op);
  void await_launch(const Plan& plan);
  // Nothing of earlier calls is under way on stream-ordered links of the plan.
  bool queues_idle(const Plan& plan) const;
  void drop_groups(const Op& op);
  void clear_groups();

  std::shared_ptr<Engine> engine_;
  Completions& completions_;
  const uint32_t number_;
  const std::shared_ptr<OrderedIssue> lane_groups_;
  std::unique_ptr<ControlPlane> control_;
  LinkTable links_{0};
  std::vector<OpRef> ops_;      // in flight, in order of start
  std::vector<Failure> found_;  // in order
  bool proposed_ = false;       // the control plane has a cause from here, and will decide soon
  bool settling_ = false;       // operations that were cancelled wait until links are settled
  std::atomic<bool> failed_{false};  // failure_ has been written
  mutable std::mutex mutex_;         // guards failure_
  FailureCause failure_;
};

}  // namespace sotto
