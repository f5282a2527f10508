#include "transports/inproc/control.h"

namespace sotto::inproc {

InprocControl::InprocControl(std::shared_ptr<Hub> hub, std::shared_ptr<Mailbox> mailbox,
                             int32_t rank, int32_t size)
    : hub_(std::move(hub)), mailbox_(std::move(mailbox)), rank_(rank), size_(size) {
  mailbox_->add(this);
}

InprocControl::~InprocControl() {
  mailbox_->remove(this);
  if (!left_) hub_->lost(rank_);
}

Result<std::vector<std::string>> InprocControl::all_gather(std::string_view what,
                                                           std::string_view mine, Driver& driver,
                                                           Deadline deadline) {
  if (left_) return invalid_state("{}: rank {} has left the group", what, rank_);
  const uint64_t round = round_++;
  hub_->contribute(round, what, rank_, mine);
  driver.run_until([&] { return hub_->gathered(round); }, deadline);
  return hub_->collect(round, rank_);
}

void InprocControl::fail(const FailureCause& cause) { hub_->fail(cause); }

const std::optional<FailureCause>& InprocControl::failure() const {
  if (!failure_ && hub_->failed()) failure_ = hub_->cause();
  return failure_;
}

void InprocControl::set_listener(ControlListener* listener) {
  listener_ = listener;
  if (hub_->failed()) mailbox_->wake();
}

void InprocControl::leave(Deadline) {
  if (left_) return;
  left_ = true;
  hub_->leave(rank_);
}

bool InprocControl::run() {
  if (told_ || left_ || listener_ == nullptr || !failure()) return false;
  told_ = true;
  listener_->on_control_failure(*failure_);
  return true;
}

}  // namespace sotto::inproc
