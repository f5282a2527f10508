// How long averages take and how much of that inner steps hide, by closed formulas (specification
// co2-overlap, sections 12.3 and 12.4). Times are in seconds, sizes in bits.
#pragma once

#include <cstdint>
#include <vector>

#include "core/config/outer_period.h"

namespace sotto {

// A rank's link, the same for all ranks.
struct LinkModel {
  double bits_per_second = 0;  // [B] in each direction, > 0
  double efficiency = 1;       // [eta] the share that is left for what is sent, in (0, 1]
  double latency = 0;          // [L] one way
  double per_message = 0;      // [o] of every message

  double seconds_of(double bits) const { return bits / (efficiency * bits_per_second); }
};

// ranks: W >= 1; with one rank all of them are 0. bits: of the whole tensor, n b.
double ring_seconds(const LinkModel& link, uint64_t ranks, double bits);
double tree_seconds(const LinkModel& link, uint64_t ranks, double bits);  // double binary tree
// Direct exchanges, as this library's averages are: `hops` times everybody sends to everybody, one
// message per peer, and a rank sends sent_bits in all.
double exchange_seconds(const LinkModel& link, uint64_t ranks, uint32_t hops, double sent_bits);
// What a rank sends in a two-phase average of n elements with b1 and b2 bits each, scales apart.
double two_phase_bits(uint64_t ranks, double elements, double b1, double b2);

// A period of inner steps with the averages of its fragments.
struct PeriodModel {
  uint64_t period = 1;           // [H] inner steps
  uint64_t delay = 0;            // [D] from a launch to the use of its average, at most period
  double step = 0;               // an inner step that has the processor for itself
  std::vector<double> averages;  // of each fragment
  double outer = 0;              // launches and updates, which inner steps wait for
  double contention = 0;         // [kappa] how much longer an inner step takes beside an average
};
struct PeriodTimes {
  double exposed = 0;     // inner steps wait for averages
  double seconds = 0;     // of the period
  double efficiency = 1;  // share of it that inner steps would take alone
  double hidden = 1;      // share of the averages' time
};
PeriodTimes period_times(const PeriodModel& model);

// Bits per second and direction with which `sent_bits` are hidden behind `delay` inner steps.
double needed_bandwidth(double sent_bits, double efficiency, uint64_t delay, double step_seconds);

}  // namespace sotto
