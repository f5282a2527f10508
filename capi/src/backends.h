// What this build consists of: the device, the transports, and how a context is made of them. Only
// backends.cc sees the implementations.
#pragma once

#include <string>

#include "core/base/params.h"
#include "core/base/status.h"
#include "core/group/context.h"

namespace sotto::capi {

struct ContextChoices {
  uint32_t cpu_threads = 0;  // 0: SOTTO_CPU_THREADS, else cores / local ranks
  uint32_t max_ops = 0;      // 0: 1024
  bool progress_thread = true;
};
// The transports of this build. Reads the variables of all rows of core/base/transports.def.
BackendFactories all_backends(ParamReader& reader);
// `options` have the variables and the backends; what the machine and the choices say is added.
Result<std::shared_ptr<Context>> make_context(ContextOptions options,
                                              const ContextChoices& choices);

// The processor as a context of these variables has it. threads: 0: as ContextChoices.
Result<std::shared_ptr<Device>> make_host_device(const Params& params,
                                                 const Environment& environment, uint32_t threads);

// Of the transport between hosts, with the messages that these variables ask for.
TransportCaps network_caps(const Params& params);

// JSON; made at the first call, lives as long as the process.
const std::string& build_info();

}  // namespace sotto::capi
