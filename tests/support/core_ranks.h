// Ranks as threads on the library's internals: every rank has its own context and comm. For tests
// that look below the C ABI.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/group/comm.h"

namespace sotto::test {

struct WorldOptions {
  int32_t size = 1;
  std::string transport = "inproc";  // inproc, tcp, or a test transport that make_backends knows
  std::function<std::shared_ptr<Device>(int32_t rank)> device;  // default: CPU, one thread
  std::map<std::string, BackendFactory> backends;               // default: inproc and tcp
  Params params;
  int64_t timeout_us = 20'000'000;
  bool progress_thread = true;
};

// Runs body(comm) on every rank and destroys everything. A failure of creation, or a status that is
// not OK, of the lowest failing rank is returned with the rank in front.
Status run_world(const WorldOptions& options,
                 const std::function<Status(const std::shared_ptr<Comm>&)>& body);

std::map<std::string, BackendFactory> standard_backends();

}  // namespace sotto::test
