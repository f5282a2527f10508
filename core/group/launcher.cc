#include "core/group/launcher.h"

#include <algorithm>

#include "core/base/text.h"
#include "core/group/pmi.h"
#include "core/group/pmix.h"
#include "core/group/slurm.h"
#include "core/group/variables.h"

namespace sotto {
namespace {

struct Variables {
  Launcher launcher;
  const char* rank;
  const char* size;
};
constexpr Variables kLaunchers[] = {
    {Launcher::kSottoRun, "SOTTO_RANK", "SOTTO_WORLD_SIZE"},
    {Launcher::kTorchrun, "RANK", "WORLD_SIZE"},
    {Launcher::kOpenMpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {Launcher::kMpich, "PMI_RANK", "PMI_SIZE"},
    {Launcher::kSlurm, "SLURM_PROCID", "SLURM_NTASKS"},
};

Result<int32_t> read_number(const char* name, const std::string& text, int32_t low, int32_t high) {
  SOTTO_ASSIGN(const int64_t value, number_of(name, text, low, high));
  return static_cast<int32_t>(value);
}

bool complete(const Variables& variables, const Environment& environment) {
  return environment.get(variables.rank).has_value() && environment.get(variables.size).has_value();
}

// Another launcher has started this one's process, whose variables are inherited. MPICH's gives a
// rank a connection, which Open MPI closes in what it starts.
bool inherited(const Variables& variables, const Environment& environment) {
  if (variables.launcher != Launcher::kOpenMpi || !has_pmi_connection(environment)) return false;
  return complete(*std::ranges::find(kLaunchers, Launcher::kMpich, &Variables::launcher),
                  environment);
}

// By what the launcher says of the ranks on this machine.
Reach reach_of(const LaunchInfo& info, const Environment& environment, const char* local_size) {
  const bool all_here = environment.get(local_size) == std::to_string(info.size);
  return all_here ? Reach::kHost : Reach::kNetwork;
}

// Managers live as long as the process, longer than any context and its clock.
Result<MeetingPlace> by_pmi(const LaunchInfo& info, const Environment& environment) {
  SOTTO_ASSIGN(const PmiServer server, pmi_server(environment));
  MeetingPlace place;
  place.reach = reach_of(info, environment, "MPI_LOCALNRANKS");
  place.manager = {server.name, [server, rank = info.rank, size = info.size](Deadline deadline) {
                     return open_pmi(server, rank, size, Clock::monotonic(), deadline);
                   }};
  return place;
}

Result<MeetingPlace> by_pmix(const LaunchInfo& info, const Environment& environment) {
  SOTTO_ASSIGN(const std::string name, pmix::server_name(environment));
  SOTTO_ASSIGN(const pmix::Api api, pmix::load());
  MeetingPlace place;
  place.reach = reach_of(info, environment, "OMPI_COMM_WORLD_LOCAL_SIZE");
  place.manager = {name, [api, name, rank = info.rank, size = info.size](Deadline deadline) {
                     return pmix::open(api, name, rank, size, Clock::monotonic(), deadline);
                   }};
  return place;
}

}  // namespace

Result<LaunchInfo> launch_info(const Params& params, const Environment& environment) {
  LaunchInfo info;
  for (const Variables& variables : kLaunchers) {
    const std::optional<std::string> rank = environment.get(variables.rank);
    const std::optional<std::string> size = environment.get(variables.size);
    if (!rank.has_value() && !size.has_value()) continue;
    if (inherited(variables, environment)) continue;
    if (!rank.has_value() || !size.has_value()) {
      // Some systems set one of them for other purposes; only our own pair has to be complete.
      if (variables.launcher != Launcher::kSottoRun) continue;
      return invalid_argument("environment variable {} is set, but {} is not",
                              rank ? variables.rank : variables.size,
                              rank ? variables.size : variables.rank);
    }
    SOTTO_ASSIGN(info.size, read_number(variables.size, *size, 1, 65535));
    SOTTO_ASSIGN(info.rank, read_number(variables.rank, *rank, 0, info.size - 1));
    info.launcher = variables.launcher;
    info.source = fmt::format("{}={}, {}={}", variables.rank, *rank, variables.size, *size);
    break;
  }
  if (info.launcher == Launcher::kNone && environment.get("PMI_PORT").has_value()) {
    return invalid_argument(
        "PMI_PORT is set, but not PMI_RANK and PMI_SIZE: start ranks without mpiexec's -pmi-port, "
        "or set SOTTO_RANK and SOTTO_WORLD_SIZE with SOTTO_RENDEZVOUS");
  }
  if (info.size == 1) return info;  // meets no one
  if (!params.rendezvous.empty()) {
    info.address = params.rendezvous;
    return info;
  }
  const auto host = environment.get("MASTER_ADDR");
  const auto port = environment.get("MASTER_PORT");
  if (host.has_value() && port.has_value() && !host->empty()) {
    SOTTO_ASSIGN(const int32_t number, read_number("MASTER_PORT", *port, 1, 65534));
    const bool v6 = host->find(':') != std::string::npos;
    info.address = v6 ? fmt::format("tcp://[{}]:{}", *host, number + 1)
                      : fmt::format("tcp://{}:{}", *host, number + 1);
  }
  return info;
}

Result<MeetingPlace> meeting_place(const LaunchInfo& info, const Environment& environment) {
  switch (info.launcher) {
    case Launcher::kOpenMpi: return by_pmix(info, environment);
    case Launcher::kMpich: return by_pmi(info, environment);
    case Launcher::kSlurm: {
      SOTTO_ASSIGN(const SlurmPlace slurm, slurm_place(environment));
      const Reach reach = slurm.several_hosts ? Reach::kNetwork : Reach::kHost;
      return MeetingPlace{slurm.address, std::nullopt, reach};
    }
    case Launcher::kNone:
    case Launcher::kSottoRun:
    case Launcher::kTorchrun: break;
  }
  return invalid_argument(
      "the environment says {} ({}), but no rendezvous is known: set "
      "SOTTO_RENDEZVOUS=tcp://host:port (an address of rank 0), or MASTER_ADDR and MASTER_PORT",
      counted(info.size, "rank"), info.source);
}

}  // namespace sotto
