// CUDA graphs that have calls of NCCL in them. NCCL ends a communicator, also by an abort, only
// when all that have calls of it are destroyed, which is the caller's to do.
//
// Threads: any.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "core/base/status.h"

namespace sotto::nccl {

// Copies count the same graphs.
class LiveGraphs {
 public:
  // The stream is being captured. The graph counts until it, what is instantiated from it and the
  // last launch of that are gone.
  Status add(cudaStream_t captured) const;
  bool any() const;
  // Waits until there is none, or `enough` is set, which wake() makes it look at.
  void wait_for_none(const std::atomic<bool>& enough) const;
  void wake() const;

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t graphs = 0;
  };
  static void destroyed(void* user);

  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace sotto::nccl
