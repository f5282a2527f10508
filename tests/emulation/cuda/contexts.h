// The lock of a device's context (Options::context_lock). Drivers keep it while a call waits for
// the device: the first launch of a kernel, allocations, copies to pageable memory. All other calls
// on the context then wait for that call.
//
// Threads: any.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/emulation/cuda/stream.h"

namespace sotto::fake_cuda {

class Contexts {
 public:
  // Waits until no call has the lock of the device.
  void pass(int device);
  // Waits, with the lock, until the streams have nothing left. Ends the process if that takes
  // Options::deadlock_ms: `call` waits for what only other calls can bring about.
  void wait_locked(int device, const std::vector<Ref<Stream>>& streams, const std::string& call);

 private:
  std::mutex& lock_of(int device);

  std::mutex mutex_;
  std::map<int, std::mutex> locks_;
};

Contexts& contexts_of_devices();

}  // namespace sotto::fake_cuda
