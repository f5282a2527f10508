// Periods of outer steps that are not in the file: "period": "auto" (specification co2-overlap,
// section 12.4; design page overlap, section 4).
#pragma once

#include <cstdint>

#include "core/config/outer.h"

namespace sotto {

// Inner steps after which the first launch may decide on the period, at least.
inline constexpr uint64_t kMeasuredSteps = 20;

// Inner steps that hide an average, with 10 % to spare: >= 1.
uint64_t smallest_delay(double comm_seconds, double step_seconds);

// The period while it is measured: short, so that averages are seen soon, but longer than a delay
// that was given.
uint64_t measuring_period(const OuterConfig& config);
// The shortest one that hides the averages of all fragments, which share the link. A delay that was
// given stays shorter than it.
uint64_t automatic_period(const OuterConfig& config, double comm_seconds, double step_seconds);

}  // namespace sotto
