// The queues of a device's hardware, over which streams are spread (CUDA_DEVICE_MAX_CONNECTIONS).
// What is at the head of one holds up all behind it, whichever stream that is of: a wait until it
// is satisfied, other work until it begins.
//
// Threads: any.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "tests/emulation/cuda/sync_model.h"

namespace sotto::fake_cuda {

class HardwareQueue {
 public:
  // The place of what is submitted now.
  uint64_t enter() {
    Quiet quiet;
    std::lock_guard lock(mutex_);
    return entered_++;
  }
  // Waits until everything before the place has left.
  void await_head(uint64_t place) {
    Quiet quiet;
    std::unique_lock lock(mutex_);
    moved_.wait(lock, [&] { return left_ == place; });
  }
  // What is at the head leaves.
  void leave() {
    Quiet quiet;
    std::lock_guard lock(mutex_);
    ++left_;
    moved_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable moved_;
  uint64_t entered_ = 0, left_ = 0;
};

}  // namespace sotto::fake_cuda
