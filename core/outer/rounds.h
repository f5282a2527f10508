// When fragments of an outer optimizer launch and consume (specification co2-overlap, section 3): a
// function of the number of inner steps alone, so that it is the same on all ranks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/outer/fragment.h"

namespace sotto {

// Every `period` inner steps behind inner step `start` a fragment is launched.
struct OuterRhythm {
  uint64_t period = 1;
  uint64_t start = 0;

  // Launches of a fragment lie this far behind multiples of the period.
  uint64_t offset(uint64_t fragment, uint64_t fragments) const {
    // fragment * period / fragments, without their product.
    return period / fragments * fragment + period % fragments * fragment / fragments;
  }
  bool operator==(const OuterRhythm&) const = default;
};

struct OuterRounds {
  OuterRhythm now;
  uint64_t delay = 0;  // from launch to consumption
  uint64_t fragments = 1;
  // Inner steps before outer steps begin: each ends with the mean of parameters, or has averaged
  // gradients.
  uint64_t synchronous = 0;
  bool gradients = false;
  bool measures = false;  // first inner steps of rounds are measured
  // The rhythm until inner step `past_end`; 0: there was no other one.
  OuterRhythm past;
  uint64_t past_end = 0;

  bool follows() const { return delay == now.period; }

  // Another period from inner step `step` on. What was launched before is consumed as ever; where
  // delay is not the period nothing is launched until then.
  void change_period(uint64_t step, uint64_t period) {
    past = now;
    past_end = step;
    now = {period, follows() ? step : step + delay};
    if (delay == past.period) delay = period;
  }

  // After so many inner steps.
  OuterEvents at(uint64_t step, uint64_t fragment) const {
    OuterEvents events;
    if (step == 0) return events;
    if (step <= synchronous) {
      (gradients ? events.follows : events.averages) = true;
      return events;
    }
    events.launches = launched(step, fragment);
    // With delay = period the first one of a fragment has nothing to consume: it holds.
    events.consumes =
        follows() ? events.launches : step > delay && launched(step - delay, fragment);
    events.measures = measures && (step == synchronous + 1 || launched(step - 1, fragment));
    return events;
  }
  // Inner steps after `step` until something happens.
  uint64_t until_next(uint64_t step) const {
    if (step < synchronous) return 1;
    uint64_t next = step + now.period + 2 * delay;
    for (uint64_t f = 0; f < fragments; ++f) {
      next = std::min(next, next_launch(step, f));
      if (!follows()) next = std::min(next, next_launch(step - std::min(step, delay), f) + delay);
    }
    return next - step;
  }
  // Inner steps since the last launch of a fragment, or since outer steps began.
  uint64_t since_launch(uint64_t step, uint64_t fragment) const {
    uint64_t last = last_launch(now, step, fragment);
    if (last == 0 && past_end != 0) last = last_launch(past, std::min(step, past_end), fragment);
    return step - std::min(step, std::max(last, synchronous));
  }

 private:
  bool launched(uint64_t step, uint64_t fragment) const {
    const OuterRhythm& rhythm = past_end != 0 && step <= past_end ? past : now;
    if (step <= rhythm.start) return false;
    const uint64_t n = step - rhythm.start, offset = rhythm.offset(fragment, fragments);
    return n >= offset && (n - offset) % rhythm.period == 0;
  }
  uint64_t first_launch(const OuterRhythm& rhythm, uint64_t fragment) const {
    const uint64_t offset = rhythm.offset(fragment, fragments);
    return rhythm.start + (offset == 0 ? rhythm.period : offset);
  }
  // 0: there was none.
  uint64_t last_launch(const OuterRhythm& rhythm, uint64_t step, uint64_t fragment) const {
    const uint64_t first = first_launch(rhythm, fragment);
    return step < first ? 0 : step - (step - first) % rhythm.period;
  }
  // Behind `step`.
  uint64_t next_launch(const OuterRhythm& rhythm, uint64_t step, uint64_t fragment) const {
    const uint64_t first = first_launch(rhythm, fragment);
    return step < first ? first : step + rhythm.period - (step - first) % rhythm.period;
  }
  uint64_t next_launch(uint64_t step, uint64_t fragment) const {
    if (past_end != 0) {
      const uint64_t next = next_launch(past, step, fragment);
      if (next <= past_end) return next;
    }
    return next_launch(now, std::max(step, past_end), fragment);
  }
};

}  // namespace sotto
