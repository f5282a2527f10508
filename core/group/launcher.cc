#include "core/group/launcher.h"

#include <charconv>
#include <optional>

namespace sotto {
namespace {

struct Launcher {
  const char* rank;
  const char* size;
};
constexpr Launcher kLaunchers[] = {
    {"SOTTO_RANK", "SOTTO_WORLD_SIZE"},                // sotto-run
    {"RANK", "WORLD_SIZE"},                            // torchrun
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},  // Open MPI
    {"PMI_RANK", "PMI_SIZE"},                          // MPICH
    {"SLURM_PROCID", "SLURM_NTASKS"},                  // Slurm
};

Result<int32_t> read_number(const char* name, const std::string& text, int32_t low, int32_t high) {
  int32_t value = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failed != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    return invalid_argument("environment variable {} is \"{}\"; allowed: a whole number {} to {}",
                            name, text, low, high);
  }
  return value;
}

}  // namespace

Result<LaunchInfo> launch_info(const Params& params, const Environment& environment) {
  LaunchInfo info;
  for (const Launcher& launcher : kLaunchers) {
    const std::optional<std::string> rank = environment.get(launcher.rank);
    const std::optional<std::string> size = environment.get(launcher.size);
    if (!rank.has_value() && !size.has_value()) continue;
    if (!rank.has_value() || !size.has_value()) {
      // Some systems set one of them for other purposes; only our own pair has to be complete.
      if (&launcher != &kLaunchers[0]) continue;
      return invalid_argument("environment variable {} is set, but {} is not",
                              rank ? launcher.rank : launcher.size,
                              rank ? launcher.size : launcher.rank);
    }
    SOTTO_ASSIGN(info.size, read_number(launcher.size, *size, 1, 65535));
    SOTTO_ASSIGN(info.rank, read_number(launcher.rank, *rank, 0, info.size - 1));
    info.source = fmt::format("{}={}, {}={}", launcher.rank, *rank, launcher.size, *size);
    break;
  }
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

}  // namespace sotto
