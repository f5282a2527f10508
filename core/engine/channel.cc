#include "core/engine/channel.h"

#include <algorithm>

#include "core/base/log.h"
#include "core/engine/engine.h"

namespace sotto {
namespace {

// How long abort waits for the control plane's word on the first cause.
constexpr int64_t kDecisionLimitUs = 2'000'000;
// How long a failed comm's connections have to deliver what was decided.
constexpr int64_t kFailedCloseUs = 300'000;

}  // namespace

Channel::~Channel() {
  engine_->drive([&](Driver&) {
    engine_->remove_channel(this);
    if (control_ != nullptr) control_->set_listener(nullptr);
    transport_.reset();
    control_.reset();
  });
}

void Channel::attach(std::unique_ptr<ControlPlane> control) {
  control_ = std::move(control);
  control_->set_listener(this);
  engine_->add_channel(this);
}

void Channel::attach(std::unique_ptr<Transport> transport) { transport_ = std::move(transport); }

Status Channel::failure() const {
  const FailureCause first = cause();
  return first.code == Code::kOk ? ok_status() : Status(first.code, first.text);
}

FailureCause Channel::cause() const {
  if (!failed()) return {};
  std::lock_guard lock(mutex_);
  return failure_;
}

void Channel::abort(const FailureCause& cause) {
  engine_->run_on_driver([&] { engine_->propose_failure(*this, cause); });
  if (engine_->wait_until([this] { return failed(); }, kDecisionLimitUs)) return;
  engine_->run_on_driver([&] { engine_->fail_channel(*this, cause); });
}

void Channel::unrecord(const Run& run) {
  engine_->drive([&](Driver&) {
    if (transport_ == nullptr) return;
    for (const OpPosting& posting : run.postings) transport_->unrecord(posting);
  });
}

void Channel::close(int64_t timeout_us) {
  engine_->drive([&](Driver& driver) {
    const bool lost = failed() || (control_ != nullptr && control_->failure().has_value());
    const Deadline deadline =
        Deadline::in_us(driver.clock(), lost ? std::min(timeout_us, kFailedCloseUs) : timeout_us);
    if (control_ != nullptr) control_->set_listener(nullptr);
    if (transport_ != nullptr) transport_->close(deadline);
    if (control_ != nullptr) control_->leave(deadline);
  });
}

void Channel::on_transfer(Transfer& transfer, Status status) noexcept {
  engine_->completions_.push_back({&transfer, std::move(status)});
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
  if (transport_ == nullptr) return ok_status();
  for (const OpPosting& posting : run.postings) SOTTO_TRY(transport_->post_op(posting));
  return ok_status();
}

Status Channel::verify(const Run& run) {
  for (const OpPosting& posting : run.postings) SOTTO_TRY(transport_->verify(posting));
  return ok_status();
}

void Channel::retire(const Run& run) {
  if (transport_ == nullptr || failed()) return;
  for (const OpPosting& posting : run.postings) transport_->retire(posting);
}

void Channel::cancel(const Run& run) {
  if (transport_ == nullptr) return;
  for (const OpPosting& posting : run.postings) transport_->cancel(posting);
}

void Channel::restart(const Run& run) {
  if (transport_ == nullptr) return;
  for (const OpPosting& posting : run.postings) transport_->restart(posting);
}

}  // namespace sotto
