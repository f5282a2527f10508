// The backend for ranks with CUDA devices that reach each other through NCCL: the messages of a
// comm. Its ranks meet, and have their control mesh, through another backend (TCP).
#pragma once

#include <memory>

#include "core/base/params.h"
#include "core/iface/rendezvous.h"
#include "transports/nccl/nccl_options.h"

namespace sotto {

// What the SOTTO_* variables say.
NcclOptions nccl_options(const Params& params);

// One per context. NCCL is looked for when the first group is connected. A communicator is made on
// the device that is current on the thread that creates the comm.
Result<std::unique_ptr<Backend>> make_nccl_backend(const NcclOptions& options);

}  // namespace sotto
