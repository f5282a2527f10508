#include "transports/inproc/control.h"

namespace sotto::inproc {

InprocControl::InprocControl(std::shared_ptr<Hub> hub, std::shared_ptr<Mailbox> mailbox,
                             int32_t rank, int32_t size)
    : hub_(std::move(hub)),
      mailbox_(std::move(mailbox)),
      rank_(rank),
      size_(size),
      services_(rank, size) {
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

Status InprocControl::send_service(int32_t to, uint32_t channel, std::string_view bytes) {
  if (failure()) return failure_->status();
  if (!established_ || left_)
    return invalid_state(
        "rank {}: service messages are for groups that are set up and have not ended", rank_);
  ServiceMessage message{rank_, to, channel, std::string(bytes)};
  SOTTO_TRY(services_.admit(message));
  hub_->post(std::move(message));
  return ok_status();
}

void InprocControl::set_service_listener(uint32_t channel, ServiceListener* listener) {
  services_.listen(channel, listener);
  if (listener != nullptr) mailbox_->wake();
}

// A listener may end everything but this object, whose poller is at work.
void InprocControl::deliver_services() {
  for (ServiceMessage& message : hub_->take_posted(rank_, &posted_seen_)) {
    if (const Status wrong = services_.arrived(std::move(message)); !wrong.ok())
      hub_->fail({wrong.code(), rank_, wrong.text(), rank_});
  }
  while (!left_ && !failure()) {
    const std::optional<ServiceMessage> message = services_.next();
    if (!message) break;
    hub_->post(ServiceBox::delivered(*message));
    services_.deliver(*message);
  }
}

void InprocControl::leave(Deadline) {
  if (left_) return;
  left_ = true;
  hub_->leave(rank_);
}

void InprocControl::run() {
  deliver_services();
  if (told_ || left_ || listener_ == nullptr || !failure()) return;
  told_ = true;
  listener_->on_control_failure(*failure_);
}

}  // namespace sotto::inproc
