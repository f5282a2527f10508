// What a fragment of an outer optimizer costs, from its shape alone: bytes of its averages on the
// wire, and memory. Nothing is allocated or sent; the plans are the ones that a fragment runs.
#pragma once

#include <cstdint>

#include "core/outer/plans.h"

namespace sotto {

// An average of a fragment, on one rank.
struct OuterAverage {
  PeerTraffic traffic;
  ArenaBytes arenas;  // of one run
  // Messages that follow on each other: 2 if a rank sends on what it has added up, 1 if all is sent
  // at once, 0 if there is nothing to send.
  uint32_t hops = 0;
};
// compressed: with the settings' codec.
Result<OuterAverage> outer_average(const OuterShape& shape, const LoweringTarget& target,
                                   bool compressed);

// The averages that a fragment makes: dense ones, and those of its codec.
struct OuterAverages {
  OuterAverage dense, coded;
};

// Bytes that a fragment holds (OuterFragment::state_bytes) from the second boundary on, when its
// first launches without the codec are over. A flush and a swap add to it what they need.
Result<uint64_t> outer_state_bytes(const OuterShape& shape, const LoweringTarget& target,
                                   const OuterAverages& averages);

}  // namespace sotto
