// The backend for ranks of one host, through memory that they share.
#pragma once

#include <memory>

#include "core/base/clock.h"
#include "core/iface/rendezvous.h"
#include "transports/shm/handover.h"
#include "transports/shm/params.h"

namespace sotto {

struct ShmOptions {
  shm::HandoverOptions handover;
  bool named = false;            // asked for by name: what has no shared memory is a warning
  const Clock* clock = nullptr;  // null: monotonic
};

// From the SOTTO_* variables: those that rooms share, and its own.
ShmOptions shm_options(const Params& common, const shm::Params& own);

// Without a rendezvous of its own. connect links those of the peers that can have shared memory
// with this rank (Transport::reaches); the log has the others and why. TRANSPORT: no descriptors
// left. Transports may outlive it.
Result<std::unique_ptr<Backend>> make_shm_backend(const ShmOptions& options);

}  // namespace sotto
