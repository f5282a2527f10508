// A backend whose transport does what a network may do, scripted by a seed: messages and
// completions that come late and in another order, messages that never arrive or arrive damaged,
// peers that are lost.
//
// Damage is done to the bytes of a message before the wrapped transport gets them, so a transport
// with checksums does not notice it (FaultyProxy damages what is below a checksum). It shows
// whether a test would notice wrong data.
//
// Threads: as Backend; FaultState from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/group/context.h"
#include "core/iface/rendezvous.h"

namespace sotto::test {

enum class FaultKind : uint8_t {
  kDrop,      // never sent; the send never completes
  kFlipBit,   // one bit of the data, chosen by the seed; messages without data are passed on
  kTruncate,  // the last byte is missing
  kLosePeer,  // on_failure(PEER_LOST) with the destination instead of the message
};

struct FaultScript {
  uint64_t seed = 1;
  // Sends and completions are held back for up to this many polls and leave in random order; 0: not
  // at all.
  uint32_t max_delay_polls = 0;
  struct Fault {
    FaultKind kind;
    uint64_t which;  // of FaultState::sends
  };
  std::vector<Fault> faults = {};
};

// What has happened so far on one rank.
struct FaultState {
  std::atomic<uint64_t> sends{0};  // since `counts`
  std::atomic<uint64_t> faults{0};
  // Sends are counted, and the faults are theirs. May be set while the transport sends.
  std::atomic<bool> counts{true};
};

// `state` may be null. Around transports that match by key.
std::unique_ptr<Backend> make_faulty_backend(std::unique_ptr<Backend> base,
                                             const FaultScript& script,
                                             std::shared_ptr<FaultState> state = nullptr);
// The backend that `factory` makes from now on has them.
void make_faulty(BackendFactory* factory, const FaultScript& script,
                 std::shared_ptr<FaultState> state);

}  // namespace sotto::test
