// Rank, size and meeting place from a launcher's environment.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/base/params.h"
#include "core/base/status.h"
#include "core/base/transports.h"
#include "core/group/process_manager.h"

namespace sotto {

enum class Launcher : uint8_t { kNone, kSottoRun, kTorchrun, kOpenMpi, kMpich, kSlurm };

struct LaunchInfo {
  Launcher launcher = Launcher::kNone;
  int32_t rank = 0;
  int32_t size = 1;
  std::string address;  // tcp://host:port of rank 0; empty: none is set
  // Where rank and size were found, for messages: "SOTTO_RANK=0, SOTTO_WORLD_SIZE=2". A caller that
  // has set the variables is not known.
  std::string source;
};

// The first that is present: SOTTO_RANK and SOTTO_WORLD_SIZE (sotto-run), RANK and WORLD_SIZE
// (torchrun), Open MPI's, MPICH's (before Open MPI's where PMI_FD is a connection: mpiexec in a job
// of mpirun), Slurm's. The address is SOTTO_RENDEZVOUS, else MASTER_ADDR with MASTER_PORT + 1
// (torchrun's agent owns MASTER_PORT itself), where there are several ranks. With none of them: one
// rank. INVALID_ARGUMENT names the variable and its value.
Result<LaunchInfo> launch_info(const Params& params, const Environment& environment);

// How ranks meet that have no address.
struct MeetingPlace {
  std::string address;                  // of rank 0, which follows from the environment
  std::optional<ManagerPlace> manager;  // else: through this one
  Reach reach = Reach::kHost;           // how far apart ranks may be
};

// Of ranks whose launcher has set no address: Open MPI's through PMIx (core/group/pmix.h), MPICH's
// through PMI-1 (core/group/pmi.h), Slurm's at the first host of the step (core/group/slurm.h).
// INVALID_ARGUMENT: the launcher has no such thing, or its variables are missing or bad.
// UNSUPPORTED: there is no libpmix.
Result<MeetingPlace> meeting_place(const LaunchInfo& info, const Environment& environment);

}  // namespace sotto
