// The backend for ranks with CUDA devices: the messages of a comm over NCCL. The rendezvous and the
// control plane are those of another backend (TCP).
#pragma once

#include <memory>

#include "core/iface/rendezvous.h"
#include "transports/nccl/nccl_options.h"
#include "transports/nccl/params.h"

namespace sotto {

// What the SOTTO_* variables say.
NcclOptions nccl_options(const nccl::Params& params);

// One per context. NCCL is opened with the first comm. A communicator is made on the current device
// of the thread that creates the comm.
Result<std::unique_ptr<Backend>> make_nccl_backend(const NcclOptions& options);

}  // namespace sotto
