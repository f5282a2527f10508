// The messages of a run: what the transport is given, and of which receives peers learn.
#pragma once

#include <span>

#include "core/engine/links.h"
#include "core/engine/run.h"

namespace sotto {

// The transfer of a channel step, but for its owner. `ranks`: rank in the comm -> rank in the root
// comm.
Transfer& fill_transfer(Run& run, uint32_t step, std::span<const int32_t> ranks);

// Links that match by key: the receive is handed over now.
void count_receive(Run& run, const MessageStep& message);

// Tells peers for which rounds all receives have been handed over since the last call.
void announce_receives(Run& run, std::span<const int32_t> ranks, const LinkTable& links);

}  // namespace sotto
