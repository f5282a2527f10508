// Calls of the CUDA runtime: errors as statuses, and the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/base/status.h"

namespace sotto {

// OK, OUT_OF_MEMORY or DEVICE, with the call, CUDA's name, number and text of the error, and the
// device if one is given: "cudaMallocAsync on cuda:0: out of memory (cudaErrorMemoryAllocation,
// 2)". The thread's last error is forgotten if it is this one, so that others do not take it for
// theirs.
Status cuda_status(cudaError_t error, std::string_view call, int32_t device = -1);

// The same without a status.
void forget_cuda_error(cudaError_t error);

// While it lives, calls of this thread neither fail for nor spoil what any thread captures into a
// CUDA graph on other streams: the caller may do so while operations are in flight.
class BesideCaptures {
 public:
  BesideCaptures() { exchange(); }
  ~BesideCaptures() { exchange(); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  void exchange() { forget_cuda_error(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Makes a device current for its lifetime, and then the one that was before: the thread may be the
// caller's. A device without a context stays left, since making it current would make one, of
// hundreds of MiB: threads of our own, whose device is 0 until they name another, would do so on
// every rank. Beside captures.
class OnDevice {
 public:
  explicit OnDevice(int32_t device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  const Status& status() const { return status_; }

 private:
  int before_ = -1;
  bool changed_ = false;
  Status status_;
  std::optional<BesideCaptures> beside_;  // while the device is current
};

}  // namespace sotto
