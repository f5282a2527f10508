#include "core/optim/algorithms/zeroone_schedule.h"

#include <algorithm>
#include <bit>

namespace sotto {

ZeroOneUpdate ZeroOneSchedule::kind(uint64_t t, bool moved) const {
  const ZeroOneCounters& c = counters_;
  if (!c.frozen) {
    return t % c.var_interval == 0 ? ZeroOneUpdate::kVariance : ZeroOneUpdate::kCompressed;
  }
  return t % c.local_interval == 0 && moved ? ZeroOneUpdate::kSync : ZeroOneUpdate::kLocal;
}

bool ZeroOneSchedule::advance(uint64_t t) {
  ZeroOneCounters& c = counters_;
  if (c.frozen) {
    if (++c.local_counter == local_step_scaler_) {
      c.local_counter = 0;
      c.local_interval = std::min(local_step_clipper_, 2 * c.local_interval);
    }
    return false;
  }
  if (t % c.var_interval == 0 && ++c.var_counter == var_update_scaler_) {
    c.var_counter = 0;
    c.var_interval *= 2;
  }
  c.frozen = t > var_freeze_step_;
  return c.frozen;
}

Status ZeroOneSchedule::restore(const ZeroOneCounters& c, uint64_t updates, uint64_t t) {
  if (!std::has_single_bit(c.var_interval) || c.var_counter >= var_update_scaler_) {
    return invalid_argument(
        "the state's variance schedule is at interval {}, update {} of it; allowed: a power of "
        "two, and less than var_update_scaler {}",
        c.var_interval, c.var_counter, var_update_scaler_);
  }
  if (c.local_interval == 0 || c.local_interval > local_step_clipper_ ||
      c.local_counter >= local_step_scaler_) {
    return invalid_argument(
        "the state's local schedule is at interval {}, step {} of it; allowed: 1 to "
        "local_step_clipper {}, and less than local_step_scaler {}",
        c.local_interval, c.local_counter, local_step_clipper_, local_step_scaler_);
  }
  // An interval doubles at a multiple of itself; every counter counts updates.
  if (c.var_interval / 2 > t || c.var_counter > updates || c.local_counter > updates) {
    return invalid_argument(
        "the state's schedule is of another step: {} updates do not lead to variance interval {}, "
        "update {} of it, and local step {}",
        updates, c.var_interval, c.var_counter, c.local_counter);
  }
  counters_ = c;
  return ok_status();
}

}  // namespace sotto
