// Messages over UCX: InfiniBand, RoCE and whatever else it has, between ranks anywhere. The
// rendezvous is that of TCP.
#pragma once

#include <memory>
#include <string>

#include "core/base/params.h"
#include "core/iface/rendezvous.h"
#include "transports/ucx/params.h"

namespace sotto {

struct UcxOptions {
  std::string library;  // path of libucp.so.0; empty: where it is found
  uint64_t eager_bytes = 65536;
  uint64_t credit_bytes = 1u << 20;
  uint32_t background_share = 10;
  const Clock* clock = nullptr;  // null: monotonic
};

// As the variables say.
UcxOptions ucx_options(const Params& common, const ucx::Params& own);

// Without a rendezvous of its own. UNSUPPORTED: no UCX that can be used, with the names that were
// looked for. TRANSPORT: UCX does not start. Transports may outlive the backend.
Result<std::unique_ptr<Backend>> make_ucx_backend(const UcxOptions& options);

}  // namespace sotto
