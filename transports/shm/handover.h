// How ranks of one host come to have shared memory. The lower rank of a pair makes a segment and
// sends its descriptor, with that of its bell, over a unix socket; the higher one maps it and
// answers with its own bell. Names and keys of the sockets are told over the control plane, and its
// all-gathers are what ranks wait for: a socket is read only when its message is there.
//
// A pair that cannot have shared memory is told so on both sides, with the reason.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "core/iface/rendezvous.h"
#include "transports/framed/peer.h"
#include "transports/shm/carrier.h"

namespace sotto::shm {

inline constexpr uint64_t kLeastRingBytes = 16384, kMostRingBytes = uint64_t{1} << 28;

struct HandoverOptions {
  uint64_t ring_bytes = 524288;  // a power of two; of a pair the lower rank's counts
  framed::FlowLimits flow;       // of a group the smallest counts
  // Maps the memory of a peer.
  std::function<Result<Segment>(const Descriptor& memory, uint64_t bytes)> map = Segment::map;
};

struct Handover {
  std::map<int32_t, PeerRings> linked;      // by rank
  std::map<int32_t, std::string> unlinked;  // by rank: why not
  framed::FlowLimits flow;
};

// With `peers`, which may have this rank among them. Collective over the control plane. bell: this
// rank's. An error is one of the control plane, or of a peer that does not keep to the set-up.
Result<Handover> hand_over(ControlPlane& control, std::span<const int32_t> peers,
                           const HandoverOptions& options, const Bell& bell, Driver& driver,
                           Deadline deadline);

}  // namespace sotto::shm
