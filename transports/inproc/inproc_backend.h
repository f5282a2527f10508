// The backend for ranks that are threads of one process.
#pragma once

#include <memory>

#include "core/base/clock.h"
#include "core/iface/rendezvous.h"

namespace sotto {

// One per context. Its control planes and transports may outlive it. The clock lives longer than
// all of them.
Result<std::unique_ptr<Backend>> make_inproc_backend(const Clock& clock);

}  // namespace sotto
