// Measures inner steps and averages for "period": "auto". All ranks measure in the same inner
// steps; what they tell each other with one average decides, the same on all of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "core/config/outer_period.h"
#include "core/kernels/outer.h"

namespace sotto {

class PeriodTuner {
 public:
  // From inner step `step` on. known: what averages take is known from those before.
  void begin(uint64_t step, bool known = false) {
    *this = {};
    measuring_ = true;
    began_ = step;
    consumed_ = known ? UINT64_MAX / 2 : 0;
  }
  void end() { measuring_ = asked_ = answered_ = false; }
  bool measuring() const { return measuring_; }
  uint64_t began() const { return began_; }

  // Inner step `step` took so long.
  void inner_step(uint64_t step, int64_t ns) {
    if (!measuring_ || step <= began_) return;
    ns_ += ns;
    ++count_;
  }
  // Mean; 0: not known.
  int64_t step_ns() const { return count_ == 0 ? 0 : ns_ / count_; }
  // An average is consumed that is like those to come.
  void consumed() { ++consumed_; }
  // Whether the average that fragment 0 launches in inner step `step` decides: there were enough
  // inner steps, and each of the fragments has consumed an average before.
  bool asks(uint64_t step, uint64_t fragments) {
    if (!measuring_ || asked_ || step < began_ + kMeasuredSteps || consumed_ < fragments)
      return false;
    asked_ = true;
    return true;
  }
  // That average is under way.
  bool asked() const { return asked_; }
  void ask() { asked_ = true; }
  // It is gone: a later one decides.
  void forget() { asked_ = false; }
  // It is consumed.
  void answer() { answered_ = asked_; }
  bool answered() const { return answered_; }

 private:
  bool measuring_ = false, asked_ = false, answered_ = false;
  uint64_t began_ = 0, consumed_ = 0;
  int64_t ns_ = 0, count_ = 0;
};

// Of what ranks have told: the slowest rank's averages, the mean of inner steps.
struct MeasuredTimes {
  double average = 0, step = 0;  // seconds
};
inline MeasuredTimes measured_times(std::span<const OuterMessage> messages) {
  constexpr double kMicrosecond = 1e-6;
  MeasuredTimes t;
  for (const OuterMessage& m : messages) {
    t.average = std::max(t.average, kMicrosecond * m.network_us);
    t.step += kMicrosecond * m.step_us;
  }
  t.step = std::max(t.step / static_cast<double>(messages.size()), kMicrosecond);
  return t;
}

}  // namespace sotto
