// When fragments of an outer optimizer launch and consume (specification co2-overlap, section 3): a
// function of the number of inner steps alone, so that it is the same on all ranks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/outer/fragment.h"

namespace sotto {

struct OuterRounds {
  uint64_t period = 1;  // inner steps from launch to launch of a fragment
  uint64_t delay = 0;   // from launch to consumption
  uint64_t fragments = 1;
  // Inner steps before outer steps begin: each ends with the mean of parameters.
  uint64_t start = 0;
  bool measures = false;  // first inner steps of rounds are measured

  // After so many inner steps.
  OuterEvents at(uint64_t step, uint64_t fragment) const {
    OuterEvents events;
    if (step == 0) return events;
    events.averages = step <= start;
    if (events.averages) return events;
    const uint64_t n = step - start;
    const uint64_t offset = fragment * period / fragments;
    const auto launched = [&](uint64_t m) {
      return m > 0 && m >= offset && (m - offset) % period == 0;
    };
    events.launches = launched(n);
    // With delay = period the first one of a fragment has nothing to consume: it holds.
    events.consumes = (events.launches && delay == period) || (n >= delay && launched(n - delay));
    events.measures = measures && (n == 1 || launched(n - 1));
    return events;
  }
  // Inner steps after `step` until something happens.
  uint64_t until_next(uint64_t step) const {
    for (uint64_t n = 1; n <= period + delay; ++n) {
      for (uint64_t f = 0; f < fragments; ++f) {
        const OuterEvents events = at(step + n, f);
        if (events.launches || events.consumes || events.averages) return n;
      }
    }
    return period;
  }
  // Inner steps of the round that ends with a launch after `step`, as far as they are done.
  uint64_t since_launch(uint64_t step, uint64_t fragment) const {
    const uint64_t n = step > start ? step - start : 0;
    const uint64_t offset = fragment * period / fragments;
    return n < std::max(offset, uint64_t{1}) || (offset == 0 && n < period) ? n
                                                                            : (n - offset) % period;
  }
};

}  // namespace sotto
