// Serves NCCL's communicators. NCCL and CUDA send no wake-ups, so this polls: often while groups
// are in flight, else now and then, for errors.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "core/iface/transport.h"

namespace sotto::nccl {

class NcclPollSource {
 public:
  // True if anything was done.
  virtual bool run() = 0;
  virtual bool busy() const = 0;

 protected:
  ~NcclPollSource() = default;
};

class NcclPoller final : public Poller {
 public:
  bool poll(int64_t wait_us) override {
    bool ran = run();
    if (ran || wait_us <= 0) return ran;
    std::this_thread::sleep_for(
        std::chrono::microseconds(std::min({wait_us, poll_interval_us(), kLongestSleepUs})));
    return run();
  }
  int64_t poll_interval_us() const override {
    if (sources_.empty()) return INT64_MAX;
    const bool busy =
        std::any_of(sources_.begin(), sources_.end(), [](const auto* s) { return s->busy(); });
    return busy ? kBusyUs : kIdleUs;
  }
  void wake() override {}  // sleeps are short
  void add(NcclPollSource* source) { sources_.push_back(source); }
  void remove(NcclPollSource* source) { std::erase(sources_, source); }

 private:
  static constexpr int64_t kBusyUs = 20;
  static constexpr int64_t kIdleUs = 100'000;
  static constexpr int64_t kLongestSleepUs = 1000;

  bool run() {
    bool ran = false;
    for (NcclPollSource* source : sources_) ran |= source->run();
    return ran;
  }
  std::vector<NcclPollSource*> sources_;
};

}  // namespace sotto::nccl
