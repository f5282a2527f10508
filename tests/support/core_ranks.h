// Ranks as threads on the library's internals: every rank has its own context and comm. For tests
// that look below the C ABI.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/group/comm.h"
#include "transports/tcp/params.h"

namespace sotto::test {

struct WorldOptions {
  int32_t size = 1;
  std::string transport = "inproc";  // inproc, tcp, or a test transport that make_backends knows
  std::function<std::shared_ptr<Device>(int32_t rank)> device;  // default: CPU, one thread
  BackendFactories backends;                                    // default: standard_backends(tcp)
  // Changes a rank's backends; optional.
  std::function<void(int32_t rank, BackendFactories*)> wrap_backends;
  Params params;
  std::function<void(int32_t rank, Params*)> rank_params;  // changes those of a rank; optional
  tcp::Params tcp;
  int64_t timeout_us = 20'000'000;
  bool progress_thread = true;
  const Clock* clock = &Clock::monotonic();  // of operations
  std::function<void()> on_rank_thread;      // first thing on every rank's thread
};

// Runs body(comm) on every rank and destroys everything. A failure of creation, or a status that is
// not OK, of the lowest failing rank is returned with the rank in front.
Status run_world(const WorldOptions& options,
                 const std::function<Status(const std::shared_ptr<Comm>&)>& body);

// inproc, shm and tcp.
BackendFactories standard_backends(const tcp::Params& own = {});
// What makes a backend, changed so that its ranks are in this place (Backend::place).
std::function<Result<std::unique_ptr<Backend>>(const Params&)> placed(
    std::function<Result<std::unique_ptr<Backend>>(const Params&)> make, uint64_t place);

// Kinds of world on which every collective and optimizer has to give the same results:
//   inproc         CPU device, in-process transport
//   tcp            CPU device, sockets
//   async          kernels complete later (AsyncDevice), in-process transport
//   device_memory  the same, and the host cannot touch the device's memory: messages are staged
//   ordered        a transport without match keys
//   ordered_async  both, and messages are not cut: as NCCL
//   mixed          as async, TCP between even and odd ranks, without match keys among them
//   ucx            CPU device, UCX over sockets, where the build has it; not under ThreadSanitizer
//   cuda           a CUDA device, where the test program has one (tests/cuda/conformance_world.cc)
std::vector<std::string> world_kinds();
void add_cuda_world(WorldOptions* world) __attribute__((weak));  // null in other programs
WorldOptions world_of(const std::string& kind, int32_t size);

}  // namespace sotto::test
