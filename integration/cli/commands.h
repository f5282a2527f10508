// The commands of `sotto`; each returns the program's exit code.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace sotto_cli {

// Ends a command with the text on standard error.
class CommandError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

int run_info(bool json);

struct ConfigArguments {
  std::string file;        // "-": standard input; or one base64url word
  int32_t world_size = 0;  // 0: unknown
  uint64_t n_params = 0;   // 0: unknown
  bool json = false;
};
// 0 if the file can run here. Else a CommandError: the file is in error, or (after the report) what
// stands in its way.
int run_config(const ConfigArguments& arguments);

struct PlanArguments {
  std::string file;  // as ConfigArguments::file
  double bandwidth_mbit = 0;
  double latency_ms = 0;
  double step_ms = 0;
  int32_t ranks = 0;
  std::vector<uint64_t> params;  // elements: of the model, or of each tensor
  double contention = 0;
  bool json = false;
};
// What outer steps would cost. 0, or a CommandError.
int run_plan(const PlanArguments& arguments);

// Replaces this process by sotto-perf, which lies beside this program or in PATH.
int run_bench(const std::vector<std::string>& arguments);

}  // namespace sotto_cli
