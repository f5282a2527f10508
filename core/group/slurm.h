// Where the ranks of a Slurm step meet: at the first of its hosts, at a port that follows from the
// numbers of job and step.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/params.h"
#include "core/base/status.h"

namespace sotto {

struct SlurmHosts {
  std::string first;
  bool several = false;  // or the list names more than one
};
// Of a list in Slurm's compact form: "node[01-03,7],other5" begins with node01. All of it is
// checked. INVALID_ARGUMENT names the variable and where its value goes wrong.
Result<SlurmHosts> slurm_hosts(const std::string& variable, const std::string& list);

// 20000 + (16 * job + step) mod 10000: below the ports that Linux gives to connections, and
// different for 16 steps of 625 jobs in a row.
uint16_t slurm_port(int64_t job, int64_t step);

struct SlurmPlace {
  std::string address;  // tcp://host:port
  bool several_hosts = false;
};
// From SLURM_STEP_NODELIST, else SLURM_JOB_NODELIST; SLURM_JOB_ID; SLURM_STEP_ID, else 0.
// INVALID_ARGUMENT: one is missing or bad.
Result<SlurmPlace> slurm_place(const Environment& environment);

}  // namespace sotto
