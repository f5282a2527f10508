// Puts the work of transports in front of the poller of the backend that they have their rendezvous
// from. NCCL and CUDA wake nobody, so a poll waits shortly while there is work in flight.
#pragma once

#include <algorithm>
#include <vector>

#include "core/iface/transport.h"

namespace sotto::nccl {

class PollSource {
 public:
  // True if anything was done.
  virtual bool run() = 0;
  virtual bool busy() const = 0;

 protected:
  ~PollSource() = default;
};

class OverlayPoller final : public Poller {
 public:
  // The base lives longer.
  explicit OverlayPoller(Poller& base) : base_(base) {}
  bool poll(int64_t wait_us) override {
    bool ran = run();
    const bool busy =
        std::any_of(sources_.begin(), sources_.end(), [](const auto* s) { return s->busy(); });
    ran |= base_.poll(ran ? 0 : std::min(wait_us, busy ? kBusyWaitUs : kIdleWaitUs));
    return run() || ran;
  }
  void wake() override { base_.wake(); }
  void forward_wakes(Poller* other) override { base_.forward_wakes(other); }
  void add(PollSource* source) { sources_.push_back(source); }
  void remove(PollSource* source) { std::erase(sources_, source); }

 private:
  static constexpr int64_t kBusyWaitUs = 20;
  static constexpr int64_t kIdleWaitUs = 100'000;  // errors of NCCL are looked at

  bool run() {
    bool ran = false;
    for (PollSource* source : sources_) ran |= source->run();
    return ran;
  }
  Poller& base_;
  std::vector<PollSource*> sources_;
};

}  // namespace sotto::nccl
