#include "cuda/calls/cuda_calls.h"

#include <cuda.h>

namespace sotto {
namespace {

using GetContextState = CUresult (*)(CUdevice, unsigned*, int*);
constexpr unsigned kGetContextStateVersion = 7000;  // CUDA version of the signature

GetContextState find_get_context_state() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t asked = cudaGetDriverEntryPointByVersion(
      "cuDevicePrimaryCtxGetState", &entry, kGetContextStateVersion, cudaEnableDefault, &found);
  if (asked != cudaSuccess) forget_cuda_error(asked);
  if (asked != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<GetContextState>(entry);
}

// Whether this process has a context on the device; true if that is unknown.
bool has_context(int device) {
  static const GetContextState get_state = find_get_context_state();
  unsigned flags = 0;
  int active = 1;
  return get_state == nullptr || get_state(device, &flags, &active) != CUDA_SUCCESS || active != 0;
}

}  // namespace

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

OnDevice::OnDevice(int32_t device) {
  status_ = cuda_status(cudaGetDevice(&before_), "cudaGetDevice", device);
  if (status_.ok() && before_ != device) {
    status_ = cuda_status(cudaSetDevice(device), "cudaSetDevice", device);
    changed_ = status_.ok();
  }
  if (status_.ok()) beside_.emplace();
}

OnDevice::~OnDevice() {
  beside_.reset();
  if (changed_ && has_context(before_)) (void)cudaSetDevice(before_);
}

}  // namespace sotto
