// Rank, size and rendezvous address from a launcher's environment.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/params.h"
#include "core/base/status.h"

namespace sotto {

struct LaunchInfo {
  int32_t rank = 0;
  int32_t size = 1;
  std::string address;  // tcp://host:port of rank 0; empty: none known
  // Where rank and size were found, for messages: "SOTTO_RANK=0, SOTTO_WORLD_SIZE=2". A caller that
  // has set the variables is not known.
  std::string source;
};

// The first that is present: SOTTO_RANK and SOTTO_WORLD_SIZE (sotto-run), RANK and WORLD_SIZE
// (torchrun), Open MPI's, MPICH's, Slurm's. The address is SOTTO_RENDEZVOUS, else MASTER_ADDR with
// MASTER_PORT + 1 (torchrun's agent owns MASTER_PORT itself). With none of them: one rank.
// INVALID_ARGUMENT names the variable and its value.
Result<LaunchInfo> launch_info(const Params& params, const Environment& environment);

}  // namespace sotto
