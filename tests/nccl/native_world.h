// Ranks as threads on the fake NCCL, and its collectives that they have called.
#pragma once

#include <array>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "tests/cuda/device_memory.h"
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/nccl/fake_nccl.h"

namespace sotto::test {

inline constexpr std::array kNativeNames = {"ncclAllGather", "ncclBroadcast", "ncclReduceScatter",
                                            "ncclAllReduce"};
using Calls = std::array<uint64_t, kNativeNames.size()>;

// So many of each rank.
inline Calls each(int32_t size, Calls calls) {
  for (uint64_t& n : calls) n *= static_cast<uint64_t>(size);
  return calls;
}

inline Calls calls_so_far() {
  Calls calls{};
  for (size_t i = 0; i < kNativeNames.size(); ++i) calls[i] = fake_nccl_calls_of(kNativeNames[i]);
  return calls;
}

struct NativeRun {
  std::string failure;
  std::vector<std::string> results;  // of the ranks
  Calls calls{};                     // of all ranks
};

using Body = std::function<std::string(Member&, Where)>;

// `native`: what SOTTO_NCCL_NATIVE says.
inline NativeRun run_native(int32_t size, const char* native, const Body& body,
                            const char* transport = "nccl", Where where = Where::kCuda) {
  NativeRun run;
  run.results.resize(static_cast<size_t>(size));
  WorldOptions options;
  options.transport = transport;
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank)); };
  fake_cuda::configure({.devices = 4});
  setenv("SOTTO_NCCL_NATIVE", native, 1);
  const Calls before = calls_so_far();
  run.failure = run_world(size, options, [&](Member& self) {
    run.results[static_cast<size_t>(self.rank)] = body(self, where);
  });
  unsetenv("SOTTO_NCCL_NATIVE");
  const Calls after = calls_so_far();
  for (size_t i = 0; i < run.calls.size(); ++i) run.calls[i] = after[i] - before[i];
  return run;
}

}  // namespace sotto::test
