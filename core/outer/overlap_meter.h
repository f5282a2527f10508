// How much of the time of averages inner steps have hidden (specification co2-overlap,
// section 12.1).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace sotto {

class OverlapMeter {
 public:
  // An average took so long, apart from time in which its slices were kept back, and ended so long
  // behind the call that asked for its consumption.
  void consumed(int64_t network_ns, int64_t late_ns) {
    network_ns_ = std::max<int64_t>(0, network_ns);
    exposed_ns_ = std::clamp<int64_t>(late_ns, 0, network_ns_);
    all_network_ns_ += network_ns_;
    all_exposed_ns_ += exposed_ns_;
  }
  // Between two calls the trainer made an inner step: with an average on its way for all of that
  // time, or with none. Others are left out.
  void inner_step(int64_t ns, bool beside_average) {
    InnerSteps& steps = beside_average ? beside_ : alone_;
    steps.ns += ns;
    ++steps.count;
  }

  // Of the last average; -1: there was none.
  int64_t network_ns() const { return network_ns_; }
  int64_t exposed_ns() const { return exposed_ns_; }
  // Share of the time of averages that was hidden; 1 if there was none.
  double ratio() const {
    if (all_network_ns_ == 0) return 1;
    return 1 - static_cast<double>(all_exposed_ns_) / static_cast<double>(all_network_ns_);
  }
  // How much longer inner steps are beside an average, as a share; NaN: not known.
  double contention() const {
    if (beside_.count == 0 || alone_.count == 0 || alone_.ns == 0)
      return std::numeric_limits<double>::quiet_NaN();
    return beside_.mean() / alone_.mean() - 1;
  }
  // Mean inner step; 0: not known.
  int64_t step_ns() const {
    const uint64_t count = beside_.count + alone_.count;
    return count == 0 ? 0 : (beside_.ns + alone_.ns) / static_cast<int64_t>(count);
  }

 private:
  struct InnerSteps {
    int64_t ns = 0;
    uint64_t count = 0;
    double mean() const { return static_cast<double>(ns) / static_cast<double>(count); }
  };
  int64_t network_ns_ = -1, exposed_ns_ = -1;
  int64_t all_network_ns_ = 0, all_exposed_ns_ = 0;
  InnerSteps beside_, alone_;
};

}  // namespace sotto
