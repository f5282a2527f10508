// A comm of ranks that are processes, on the library's internals.
#pragma once

#include <memory>
#include <string>

#include "core/group/comm.h"
#include "tests/support/processes.h"

namespace sotto::test {

// On the CPU, with one thread for kernels and standard_backends. Rank 0 publishes its id in the
// file.
Result<std::shared_ptr<Comm>> create_by_file(const ProcessRank& self, const Params& params,
                                             int64_t timeout_us, const std::string& id_file);

}  // namespace sotto::test
