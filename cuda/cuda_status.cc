#include "cuda/cuda_status.h"

namespace sotto {

void forget_cuda_error(cudaError_t error) {
  if (cudaPeekAtLastError() == error) (void)cudaGetLastError();
}

Status cuda_status(cudaError_t error, std::string_view call, int32_t device) {
  if (error == cudaSuccess) return ok_status();
  forget_cuda_error(error);
  const Code code = error == cudaErrorMemoryAllocation ? Code::kOutOfMemory : Code::kDevice;
  const std::string where = device < 0 ? "" : fmt::format(" on cuda:{}", device);
  return Status(code, fmt::format("{}{}: {} ({}, {})", call, where, cudaGetErrorString(error),
                                  cudaGetErrorName(error), static_cast<int>(error)));
}

CurrentDevice::CurrentDevice(int32_t device) {
  status_ = cuda_status(cudaGetDevice(&before_), "cudaGetDevice", device);
  if (!status_.ok() || before_ == device) return;
  status_ = cuda_status(cudaSetDevice(device), "cudaSetDevice", device);
  changed_ = status_.ok();
}

CurrentDevice::~CurrentDevice() {
  if (changed_) (void)cudaSetDevice(before_);
}

}  // namespace sotto
