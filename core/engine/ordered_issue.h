// The groups of messages of a link that matches by order, or of all links of a context whose
// messages are calls of lanes: they are issued whole, in the order of the calls, as long as the
// first in line is ready. Driver.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "core/engine/scheduler.h"

namespace sotto {

class OrderedIssue {
 public:
  struct Group {
    ScheduledOp* op;
    uint32_t index;  // in Plan::groups
  };

  // A group of an operation's plan, behind those that were added before.
  void add(ScheduledOp& op, uint32_t group) { groups_.push_back({&op, group}); }
  // What has not been issued of operations that will not run: those for which dropped(op).
  template <class Dropped>
  void drop(Dropped&& dropped) {
    const auto of_dropped = [&](const Group& group) { return dropped(*group.op); };
    if (!groups_.empty() && of_dropped(groups_.front())) issuing_.clear();
    std::erase_if(groups_, of_dropped);
  }
  bool empty() const { return groups_.empty(); }

  // A launch of a graph with messages is awaited: until it has ended no others are issued.
  void await_launch() { ++launches_; }
  // True: no other launch is awaited.
  bool launch_ended() { return --launches_ == 0; }
  bool awaits_launch() const { return launches_ != 0; }

  // Calls issue(group, transfers) for one group after the other. `transfers` is empty if the
  // group's were not handed to the transport yet; issue() fills it in. IN_PROGRESS: the transport
  // has them in progress, the same group comes again. Another error is returned, and the group
  // left out.
  template <class Issue>
  Status issue_ready(Issue&& issue) {
    while (const Group* group = first_ready()) {
      const Status status = issue(*group, issuing_);
      if (status.code() == Code::kInProgress) return ok_status();
      groups_.pop_front();
      issuing_.clear();
      SOTTO_TRY(status);
    }
    return ok_status();
  }
  // The transport has a group in progress.
  bool in_progress() const { return !issuing_.empty(); }

 private:
  // Null: there is none, it is not ready, or others come first.
  const Group* first_ready() const;

  std::deque<Group> groups_;        // not yet issued, in order
  std::vector<Transfer*> issuing_;  // of the first one, while the transport has it in progress
  uint32_t launches_ = 0;
};

}  // namespace sotto
