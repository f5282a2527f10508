#include "core/config/outer_period.h"

#include <algorithm>
#include <cmath>

namespace sotto {
namespace {

constexpr double kSpare = 1.1;
constexpr uint64_t kMostSteps = uint64_t{1} << 53;
constexpr uint64_t kShortest = 4;  // of periods that are measured: four averages in kMeasuredSteps

// At least `steps`, and such that fragments are evenly spaced.
uint64_t fitting(const OuterConfig& config, uint64_t steps) {
  const OuterSchedule& s = config.schedule;
  const uint64_t count = config.fragments.count;
  const uint64_t least = s.follows() ? steps : std::max(steps, s.delay + 1);
  return (least + count - 1) / count * count;
}

}  // namespace

uint64_t smallest_delay(double comm_seconds, double step_seconds) {
  // 1.1 is no binary number: ten steps are 11, not a hair more.
  constexpr double kRounding = 1 - 1e-12;
  const double steps = std::ceil(kSpare * comm_seconds / step_seconds * kRounding);
  return static_cast<uint64_t>(std::clamp(steps, 1.0, static_cast<double>(kMostSteps)));
}

uint64_t measuring_period(const OuterConfig& config) {
  return fitting(config, std::max(kShortest, 2 * config.fragments.count));
}

uint64_t automatic_period(const OuterConfig& config, double comm_seconds, double step_seconds) {
  return fitting(config, smallest_delay(comm_seconds, step_seconds));
}

}  // namespace sotto
