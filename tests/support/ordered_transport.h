// A transport without match keys, as NCCL is one: the i-th send of a rank to another meets the i-th
// receive of that other rank from it, and a group begins only when the group before it is complete
// on its rank. Around any backend for ranks that are threads of one process: rendezvous and control
// plane are that backend's own.
//
// Keys travel along for checking only. Found and reported, to all ranks through on_failure
// (PROTOCOL) and in ordered_violations():
//  - a send and a receive meet that belong to different messages, or differ in size or signature;
//  - two ranks wait for each other in groups that can never complete;
//  - a rank issues groups of a comm in another order than by operation and round, or cuts a round
//    into two groups.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "core/iface/rendezvous.h"

namespace sotto::test {

// `seed`: in which order and how late transfers that have met are completed.
std::unique_ptr<Backend> make_ordered_backend(std::unique_ptr<Backend> base, uint64_t seed,
                                              const TransportCaps& caps = {.name = "ordered"});

// Operations of a comm are issued in the order of their numbers, unless there is one of these: what
// comes behind an input, or is kept back, is issued behind later calls. For the whole process.
inline std::atomic<bool> ordered_calls_ascend{true};
struct CallsOutOfOrder {
  CallsOutOfOrder() { ordered_calls_ascend = false; }
  ~CallsOutOfOrder() { ordered_calls_ascend = true; }
};

// Texts of everything that was found in this process since the last call.
std::vector<std::string> take_ordered_violations();

}  // namespace sotto::test
