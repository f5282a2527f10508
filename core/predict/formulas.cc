#include "core/predict/formulas.h"

#include <algorithm>
#include <cmath>

namespace sotto {
namespace {

// Of what a rank has, what it sends or gets in one phase.
double share_of_peers(uint64_t ranks) {
  return static_cast<double>(ranks - 1) / static_cast<double>(ranks);
}

}  // namespace

double ring_seconds(const LinkModel& link, uint64_t ranks, double bits) {
  const auto hops = 2 * static_cast<double>(ranks - 1);
  return hops * (link.latency + link.per_message) +
         2 * share_of_peers(ranks) * link.seconds_of(bits);
}

double tree_seconds(const LinkModel& link, uint64_t ranks, double bits) {
  if (ranks == 1) return 0;
  const double depth = std::ceil(std::log2(static_cast<double>(ranks)));
  return 2 * depth * (link.latency + link.per_message) + 2 * link.seconds_of(bits);
}

double exchange_seconds(const LinkModel& link, uint64_t ranks, uint32_t hops, double sent_bits) {
  const auto messages = static_cast<double>(ranks - 1);
  return hops * (link.latency + messages * link.per_message) + link.seconds_of(sent_bits);
}

double two_phase_bits(uint64_t ranks, double elements, double b1, double b2) {
  return share_of_peers(ranks) * elements * (b1 + b2);
}

PeriodTimes period_times(const PeriodModel& m) {
  const double rho = 1 / (1 + m.contention);
  const auto period = static_cast<double>(m.period);
  const auto delay = static_cast<double>(m.delay);
  double all = 0, late = 0;
  for (const double average : m.averages) {
    all += average;
    late += std::max(0.0, average - delay * m.step / rho);
  }
  // A fragment has `delay` steps, and the link has the period for all of them.
  const bool waits = m.delay == 0;
  PeriodTimes t;
  t.exposed = waits ? all : std::max(late, all - period * m.step / rho);
  // Beside averages inner steps are slower for as long as these are under way.
  const double slowed = (1 - rho) * (all - t.exposed);
  t.seconds = period * m.step + slowed + t.exposed + m.outer;
  t.efficiency = t.seconds > 0 ? period * m.step / t.seconds : 1;
  t.hidden = all > 0 ? 1 - t.exposed / all : 1;
  return t;
}

double needed_bandwidth(double sent_bits, double efficiency, uint64_t delay, double step_seconds) {
  return sent_bits / (efficiency * static_cast<double>(delay) * step_seconds);
}

}  // namespace sotto
