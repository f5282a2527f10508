// Groups of messages enter a queue that matches by order: whole, ready, and one after the other.
#include "core/engine/ordered_issue.h"

#include <gtest/gtest.h>

namespace sotto::test {
namespace {

// An operation of one message per group.
class GroupedOp {
 public:
  explicit GroupedOp(size_t groups, bool stream_ordered = false, bool user = false) {
    plan_.messages.links = {{Matching::kByOrder, stream_ordered}};
    for (uint32_t g = 0; g < groups; ++g) {
      Step& step = plan_.steps.emplace_back();
      step.user = user;
      auto& message = step.work.emplace<MessageStep>();
      message.is_send = true;
      message.lowered.group = g;
      plan_.messages.groups.push_back({0, {g}, 0});
    }
    plan_.order.pred_begin.assign(groups + 1, 0);
    states_.reset(plan_);
    Scheduler::bind(op_, plan_, states_, 0, -1);
  }
  void ready(uint32_t group) { states_.group_pending[group] = 0; }
  ScheduledOp& op() { return op_; }

 private:
  Plan plan_;
  StepStates states_;
  ScheduledOp op_;
};

using Issued = std::vector<std::pair<const ScheduledOp*, uint32_t>>;

class OrderedIssueTest : public testing::Test {
 protected:
  // What goes now; `answers`: of the transport, one after the other, then OK.
  Issued issue(std::vector<Status> answers = {}) {
    Issued issued;
    last_ = groups_.issue_ready([&](const OrderedIssue::Group& group, auto& transfers) {
      issued.emplace_back(group.op, group.index);
      fresh_ = transfers.empty();
      transfers.assign(1, nullptr);
      if (issued.size() > answers.size()) return ok_status();
      return answers[issued.size() - 1];
    });
    return issued;
  }
  // All groups of an operation.
  void add(GroupedOp& op) {
    for (uint32_t g = 0; g < op.op().plan().messages.groups.size(); ++g) groups_.add(op.op(), g);
  }
  OrderedIssue groups_;
  Status last_;
  bool fresh_ = false;
};

TEST_F(OrderedIssueTest, InOrderAsLongAsTheFirstIsReady) {
  GroupedOp first(2), second(1);
  add(first);
  add(second);
  second.ready(0);
  EXPECT_EQ(issue(), Issued{});
  first.ready(0);
  EXPECT_EQ(issue(), (Issued{{&first.op(), 0}}));
  first.ready(1);
  EXPECT_EQ(issue(), (Issued{{&first.op(), 1}, {&second.op(), 0}}));
  EXPECT_TRUE(groups_.empty());
}

TEST_F(OrderedIssueTest, AGroupInProgressComesAgainWithItsTransfers) {
  GroupedOp op(2);
  add(op);
  op.ready(0);
  op.ready(1);
  const Status later(Code::kInProgress, "later");
  EXPECT_EQ(issue({later}), (Issued{{&op.op(), 0}}));
  EXPECT_TRUE(last_.ok());
  EXPECT_TRUE(fresh_);
  EXPECT_TRUE(groups_.in_progress());
  EXPECT_EQ(issue({later}), (Issued{{&op.op(), 0}}));
  EXPECT_FALSE(fresh_);
  EXPECT_EQ(issue(), (Issued{{&op.op(), 0}, {&op.op(), 1}}));
  EXPECT_TRUE(fresh_);
  EXPECT_FALSE(groups_.in_progress());
}

TEST_F(OrderedIssueTest, AnErrorEndsTheRound) {
  GroupedOp op(2);
  add(op);
  op.ready(0);
  op.ready(1);
  EXPECT_EQ(issue({Status(Code::kTransport, "no")}), (Issued{{&op.op(), 0}}));
  EXPECT_EQ(last_.code(), Code::kTransport);
  EXPECT_FALSE(groups_.empty());
  groups_.drop([](const ScheduledOp&) { return true; });
  EXPECT_EQ(issue(), Issued{});
}

// Also of one that the transport has in progress: the next group has transfers of its own.
TEST_F(OrderedIssueTest, WhatIsDroppedKeepsNothingBack) {
  GroupedOp first(2), second(1);
  for (GroupedOp* op : {&first, &second}) {
    add(*op);
    op->ready(0);
  }
  EXPECT_EQ(issue({Status(Code::kInProgress, "later")}), (Issued{{&first.op(), 0}}));
  groups_.drop([&](const ScheduledOp& op) { return &op == &first.op(); });
  EXPECT_FALSE(groups_.in_progress());
  EXPECT_EQ(issue(), (Issued{{&second.op(), 0}}));
  EXPECT_TRUE(fresh_);
  EXPECT_TRUE(groups_.empty());
}

TEST_F(OrderedIssueTest, NothingBesideALaunchOfAGraph) {
  GroupedOp op(1);
  add(op);
  op.ready(0);
  groups_.await_launch();
  groups_.await_launch();
  EXPECT_EQ(issue(), Issued{});
  EXPECT_FALSE(groups_.launch_ended());
  EXPECT_EQ(issue(), Issued{});
  EXPECT_TRUE(groups_.launch_ended());
  EXPECT_EQ(issue(), (Issued{{&op.op(), 0}}));
}

TEST_F(OrderedIssueTest, CallsOfLanesWaitForTheCallersStream) {
  GroupedOp calls(1, true, true), others(1, true, false), messages(1, false, true);
  for (GroupedOp* op : {&messages, &others, &calls}) {
    Scheduler::block(op->op());
    op->ready(0);
    add(*op);
  }
  EXPECT_EQ(issue(), (Issued{{&messages.op(), 0}, {&others.op(), 0}}));
  Scheduler scheduler;
  scheduler.let_start(calls.op());
  EXPECT_EQ(issue(), (Issued{{&calls.op(), 0}}));
}

}  // namespace
}  // namespace sotto::test
