#include "transports/nccl/cuda_calls.h"

#include <cuda.h>

#include <algorithm>
#include <bit>

namespace sotto::nccl {
namespace {

constexpr uint64_t kSmallestBlock = 4096;

using GetContextState = CUresult (*)(CUdevice, unsigned*, int*);
constexpr unsigned kGetContextStateVersion = 7000;  // CUDA version of the signature

GetContextState find_get_context_state() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t asked = cudaGetDriverEntryPointByVersion(
      "cuDevicePrimaryCtxGetState", &entry, kGetContextStateVersion, cudaEnableDefault, &found);
  if (asked != cudaSuccess) (void)cudaGetLastError();
  if (asked != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<GetContextState>(entry);
}

// Whether this process has a context on the device; true if nobody can tell.
bool has_context(int device) {
  static const GetContextState get_state = find_get_context_state();
  unsigned flags = 0;
  int active = 1;
  return get_state == nullptr || get_state(device, &flags, &active) != CUDA_SUCCESS || active != 0;
}

}  // namespace

Status cuda_status(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return ok_status();
  (void)cudaGetLastError();  // others in the process are not to take it for theirs
  const Code code = error == cudaErrorMemoryAllocation ? Code::kOutOfMemory : Code::kDevice;
  return Status(code, fmt::format("{}: {} ({}, {})", call, cudaGetErrorString(error),
                                  cudaGetErrorName(error), static_cast<int>(error)));
}

OnDevice::OnDevice(int device) {
  status_ = cuda_status(cudaGetDevice(&before_), "cudaGetDevice");
  if (status_.ok() && before_ != device) {
    status_ = cuda_status(cudaSetDevice(device), "cudaSetDevice");
    changed_ = status_.ok();
  }
  if (status_.ok()) beside_.emplace();
}

OnDevice::~OnDevice() {
  beside_.reset();
  if (changed_ && has_context(before_)) (void)cudaSetDevice(before_);
}

PinnedPool::~PinnedPool() {
  const OnDevice on(device_);
  for (void* const memory : allocated_) (void)cudaFreeHost(memory);
}

uint64_t PinnedPool::block_size(uint64_t bytes) {
  return std::bit_ceil(std::max(bytes, kSmallestBlock));
}

Result<std::byte*> PinnedPool::take(uint64_t bytes) {
  std::vector<std::byte*>& free = free_[block_size(bytes)];
  if (free.empty()) SOTTO_TRY(reserve(bytes, 1));
  std::byte* const at = free.back();
  free.pop_back();
  return at;
}

Status PinnedPool::reserve(uint64_t bytes, uint64_t n) {
  const uint64_t size = block_size(bytes);
  const OnDevice on(device_);
  SOTTO_TRY(on.status());
  void* made = nullptr;
  SOTTO_TRY(cuda_status(cudaHostAlloc(&made, size * n, cudaHostAllocDefault), "cudaHostAlloc"));
  allocated_.push_back(made);
  for (uint64_t i = 0; i < n; ++i) {
    std::byte* const block = static_cast<std::byte*>(made) + i * size;
    sizes_[block] = size;
    free_[size].push_back(block);
  }
  return ok_status();
}

void PinnedPool::give_back(std::byte* at) { free_[sizes_.at(at)].push_back(at); }

EventPool::~EventPool() {
  const OnDevice on(device_);
  for (const cudaEvent_t event : free_) (void)cudaEventDestroy(event);
}

Result<cudaEvent_t> EventPool::take() {
  if (!free_.empty()) {
    const cudaEvent_t event = free_.back();
    free_.pop_back();
    return event;
  }
  const OnDevice on(device_);
  SOTTO_TRY(on.status());
  cudaEvent_t event = nullptr;
  SOTTO_TRY(cuda_status(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                        "cudaEventCreateWithFlags"));
  return event;
}

}  // namespace sotto::nccl
