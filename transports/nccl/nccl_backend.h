// The backend for ranks with CUDA devices: the messages of a comm over NCCL. The rendezvous and the
// control plane are those of another backend (TCP).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/params.h"
#include "core/iface/rendezvous.h"
#include "core/iface/transport.h"

namespace sotto {

struct NcclOptions {
  std::string library;           // path of libnccl.so.2; empty: where it is found
  NativeCollectives native = 0;  // that plans may use; equal on all ranks
};

// What the SOTTO_* variables say.
NcclOptions nccl_options(const Params& params);

// One per context. NCCL is opened with the first comm. A communicator is made on the current device
// of the thread that creates the comm.
Result<std::unique_ptr<Backend>> make_nccl_backend(const NcclOptions& options);

}  // namespace sotto
