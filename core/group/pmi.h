// PMI-1: how MPICH's process manager (Hydra), and Slurm's plug-in pmi2, talk with ranks. Requests
// and replies are lines of words "name=value", over a socket of the process.
//
// The socket has one user per process: MPI_Init speaks on it too. A program that also uses MPI sets
// SOTTO_RENDEZVOUS, or gives sotto_comm_create an all-gather; then it is not touched.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/clock.h"
#include "core/base/params.h"
#include "core/base/status.h"
#include "core/group/process_manager.h"

namespace sotto {

struct PmiServer {
  std::string name;  // "PMI_FD=6"
  int fd = -1;       // of PMI_FD; -1: by PMI_PORT
  std::string host = {}, port = {};
  int64_t id = 0;  // PMI_ID, which goes with PMI_PORT
};

// INVALID_ARGUMENT: neither PMI_FD nor PMI_PORT, or bad values.
Result<PmiServer> pmi_server(const Environment& environment);

// PMI_FD names a connection that this process has.
bool has_pmi_connection(const Environment& environment);

// rank, size: as the environment has them. TRANSPORT: the socket is closed; PROTOCOL names the
// reply and what was expected; TIMEOUT; INVALID_ARGUMENT: the server has another rank or size.
// The clock lives longer.
Result<std::unique_ptr<ProcessManager>> open_pmi(const PmiServer& server, int32_t rank,
                                                 int32_t size, const Clock& clock,
                                                 Deadline deadline);

}  // namespace sotto
