// When the slices of an average under way are let go (specification co2-overlap, section 11.6): a
// function of the number of inner steps alone, so that ranks issue all messages in one order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/engine/engine.h"

namespace sotto {

class AverageSlices {
 public:
  AverageSlices() = default;
  // An average that was launched behind inner step `launched`, and is consumed `delay` steps later.
  AverageSlices(uint64_t launched, uint64_t delay) : launched_(launched), delay_(delay) {}

  // Behind inner step `step`: lets go what is due. Slice k of n is due floor(k * e / n) inner steps
  // behind the launch, e = delay - max(1, delay / 8), which leaves time for the last one.
  void let_go(Engine& engine, const OpRef& average, uint64_t step) {
    const uint64_t n = kept(average) + 1;
    const uint64_t e = delay_ - std::min(delay_, std::max<uint64_t>(1, delay_ / 8));
    const uint64_t steps = step - launched_ + 1;
    let_go_first(engine, average, e == 0 ? n : (steps * n + e - 1) / e);
  }
  // Lets go all of them, at a place that is the same on all ranks.
  void let_all_go(Engine& engine, const OpRef& average) {
    let_go_first(engine, average, kept(average) + 1);
  }
  // Some are kept back.
  bool keep_back(const OpRef& average) const { return gone_ <= kept(average); }

 private:
  // Slices behind the first one, which goes with the average.
  static uint64_t kept(const OpRef& average) { return average->plan().awaits.size(); }
  void let_go_first(Engine& engine, const OpRef& average, uint64_t n) {
    // An average that has failed takes no more of them.
    for (n = std::min(n, kept(average) + 1); gone_ < n; ++gone_)
      (void)engine.arrive(average, static_cast<uint32_t>(gone_ - 1), 0, {});
  }

  uint64_t launched_ = 0, delay_ = 0;
  uint64_t gone_ = 1;
};

}  // namespace sotto
