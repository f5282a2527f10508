// One rank's end of the control plane, for ranks that are threads of one process.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/iface/rendezvous.h"
#include "transports/inproc/hub.h"
#include "transports/inproc/mailbox.h"

namespace sotto::inproc {

class InprocControl final : public ControlPlane, private MailboxSource {
 public:
  InprocControl(std::shared_ptr<Hub> hub, std::shared_ptr<Mailbox> mailbox, int32_t rank,
                int32_t size);
  // Without leave() before, this rank is lost to the other ranks.
  ~InprocControl() override;

  int32_t rank() const override { return rank_; }
  int32_t size() const override { return size_; }
  uint64_t token() const override { return hub_->token(); }
  Result<std::vector<std::string>> all_gather(std::string_view what, std::string_view mine,
                                              Driver& driver, Deadline deadline) override;
  void fail(const FailureCause& cause) override;
  const std::optional<FailureCause>& failure() const override;
  void set_listener(ControlListener* listener) override;
  int64_t silent_ms(int32_t) const override { return 0; }
  void established() override { established_ = true; }
  Status send_service(int32_t to, uint32_t channel, std::string_view bytes) override;
  void set_service_listener(uint32_t channel, ServiceListener* listener) override;
  void leave(Deadline deadline) override;

  const std::shared_ptr<Hub>& hub() const { return hub_; }
  bool take_transport() { return !std::exchange(has_transport_, true); }

 private:
  void run() override;
  void deliver_services();

  const std::shared_ptr<Hub> hub_;
  const std::shared_ptr<Mailbox> mailbox_;
  const int32_t rank_;
  const int32_t size_;
  uint64_t round_ = 0;                           // of the next set-up exchange
  mutable std::optional<FailureCause> failure_;  // this rank's copy of the hub's
  ControlListener* listener_ = nullptr;
  ServiceBox services_;
  uint64_t posted_seen_ = 0;
  bool established_ = false;
  bool told_ = false;  // the listener was called
  bool left_ = false;
  bool has_transport_ = false;
};

}  // namespace sotto::inproc
