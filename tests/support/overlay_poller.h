// Puts the work of a test transport in front of a backend's own poller.
#pragma once

#include <algorithm>
#include <vector>

#include "core/iface/transport.h"

namespace sotto::test {

class OverlaySource {
 public:
  // True if anything was done. After a wake() of the poller it is called again.
  virtual bool run() = 0;

 protected:
  ~OverlaySource() = default;
};

class OverlayPoller final : public Poller {
 public:
  // The base lives longer.
  explicit OverlayPoller(Poller& base) : base_(base) {}
  bool poll(int64_t wait_us) override {
    bool ran = run();
    ran |= base_.poll(ran ? 0 : wait_us);
    return run() || ran;
  }
  void wake() override { base_.wake(); }
  void forward_wakes(Poller* other) override { base_.forward_wakes(other); }
  void add(OverlaySource* source) { sources_.push_back(source); }
  void remove(OverlaySource* source) { std::erase(sources_, source); }

 private:
  bool run() {
    bool ran = false;
    for (OverlaySource* source : sources_) ran |= source->run();
    return ran;
  }
  Poller& base_;
  std::vector<OverlaySource*> sources_;
};

}  // namespace sotto::test
