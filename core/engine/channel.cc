#include "core/engine/channel.h"

#include <algorithm>

#include "core/base/log.h"

namespace sotto {
Channel::~Channel() {
  if (control_ != nullptr) control_->set_listener(nullptr);
  links_ = LinkTable(0);
}

void Channel::attach(std::unique_ptr<ControlPlane> control) {
  control_ = std::move(control);
  links_ = LinkTable(control_->size());
  control_->set_listener(this);
}

void Channel::attach(std::unique_ptr<Transport> transport, std::span<const int32_t> peers) {
  links_.add(std::move(transport), peers, lane_groups_);
}

Status Channel::failure() const {
  const FailureCause first = cause();
  return first.code == Code::kOk ? ok_status() : Status(first.code, first.text);
}

FailureCause Channel::cause() const {
  if (!failed()) return {};
  std::lock_guard lock(mutex_);
  return failure_;
}

void Channel::close(Deadline deadline) {
  if (control_ != nullptr) control_->set_listener(nullptr);
  for (const Link& link : links_.all()) link.transport->close(deadline);
  if (control_ != nullptr) control_->leave(deadline);
}

void Channel::on_transfer(Transfer& transfer, Status status) noexcept {
  completions_.add(transfer, std::move(status));
}

void Channel::on_failure(int32_t peer, Status status) noexcept { found(status, peer); }

void Channel::on_control_failure(const FailureCause& cause) noexcept {
  found_.push_back({cause, true});
}

std::optional<FailureCause> Channel::propose(const FailureCause& cause) {
  if (control_ == nullptr) return cause;
  proposed_ = true;
  control_->fail(cause);
  return control_->failure();
}

bool Channel::set_failure(const FailureCause& cause) {
  if (failed()) return false;
  {
    std::lock_guard lock(mutex_);
    failure_ = cause;
    failure_.text = cause.whole_text();
  }
  failed_.store(true, std::memory_order_release);
  log(LogLevel::kInfo, "rank {}: the group has failed: {}",
      control_ != nullptr ? control_->rank() : -1, failure_.text);
  return true;
}

Status Channel::post(const Run& run) {
  for (const Link& link : links_.all()) {
    for (const OpDescriptor& descriptor : run.descriptors)
      SOTTO_TRY(link.transport->post_op(descriptor));
  }
  return ok_status();
}

Status Channel::verify(const Run& run) {
  for (const Link& link : links_.all()) {
    if (link.queue == nullptr) continue;
    for (const OpDescriptor& descriptor : run.descriptors)
      SOTTO_TRY(link.queue->verify(descriptor));
  }
  return ok_status();
}

void Channel::complete(const Run& run) {
  if (failed()) return;
  for (const Link& link : links_.all()) {
    for (const OpDescriptor& descriptor : run.descriptors) link.transport->complete(descriptor);
  }
}

void Channel::cancel(const Run& run) {
  for (const Link& link : links_.all()) {
    for (const OpDescriptor& descriptor : run.descriptors) link.transport->cancel(descriptor);
  }
}

bool Channel::settled() const {
  return std::ranges::all_of(links_.all(), [](const Link& link) {
    return link.queue == nullptr || link.queue->settled();
  });
}

void Channel::restart(const Run& run) {
  for (const Link& link : links_.all()) {
    if (link.queue == nullptr) continue;
    for (const OpDescriptor& descriptor : run.descriptors) link.queue->restart(descriptor);
  }
}

void Channel::release_captured(const Run& run) {
  for (const Link& link : links_.all()) {
    if (link.queue == nullptr) continue;
    for (const OpDescriptor& descriptor : run.descriptors) link.queue->release_captured(descriptor);
  }
}

void Channel::add_groups(Op& op) {
  const auto all_entered = [](const OpRef& before) {
    return before->done() || Scheduler::all_groups_entered(*before);
  };
  if (!std::ranges::all_of(op.request_.after_ops, all_entered)) return;
  for (uint32_t g = Scheduler::next_group(op); g != kNoStep; g = Scheduler::next_group(op))
    links_[op.plan().messages.groups[g].link].groups->add(op, g);
}

void Channel::await_launch(const Plan& plan) {
  for (size_t link = 0; link < plan.messages.links.size(); ++link) {
    if (plan.messages.links[link].stream_ordered) links_[link].groups->await_launch();
  }
}

bool Channel::queues_idle(const Plan& plan) const {
  for (size_t link = 0; link < plan.messages.links.size(); ++link) {
    const Link& of = links_.all()[link];
    if (!plan.messages.links[link].stream_ordered) continue;
    if (!of.groups->empty() || !of.queue->idle() || of.groups->awaits_launch()) return false;
  }
  return true;
}

void Channel::drop_groups(const Op& op) {
  for (Link& link : links_.all())
    link.groups->drop([&](const ScheduledOp& other) { return &other == &op; });
}

void Channel::clear_groups() {
  const auto of_channel = [this](const ScheduledOp& op) {
    return static_cast<const Op&>(op).request_.channel.get() == this;
  };
  for (Link& link : links_.all()) link.groups->drop(of_channel);
}

}  // namespace sotto
