// Devices, versions, errors.
#include <cstdio>
#include <cstring>

#include "tests/emulation/cuda/state.h"

using namespace sotto::fake_cuda;

namespace {

constexpr int kMultiprocessors = 4;
constexpr int kThreadsPerBlock = 1024;
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kSmemPerBlock = 48 * 1024;
constexpr int kSmemPerBlockOptin = 227 * 1024;
constexpr int kLowestPriority = 0, kHighestPriority = -5;

bool is_device(int device) { return device >= 0 && device < state().options.devices; }

cudaError_t attribute(cudaDeviceAttr attr, int device, int* value) {
  switch (attr) {
    case cudaDevAttrMaxThreadsPerBlock: *value = kThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = kThreadsPerMultiprocessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = kSmemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kSmemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = kSmemPerBlockOptin + 1024; break;
    case cudaDevAttrMaxGridDimX: *value = INT32_MAX; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrClockRate: *value = 1'000'000; break;
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrHostRegisterSupported: *value = 1; break;
    case cudaDevAttrPageableMemoryAccess: *value = state().options.pageable_access; break;
    case cudaDevAttrAsyncEngineCount: *value = 2; break;
    case cudaDevAttrPciBusId: *value = device + 1; break;
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId:
    case cudaDevAttrIntegrated:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrClusterLaunch:
    case cudaDevAttrComputeMode: *value = 0; break;
    default: misuse("cudaDeviceGetAttribute " + std::to_string(attr) + " is not modelled");
  }
  return cudaSuccess;
}

struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled",
     "peer access is already enabled"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const ErrorText* find(cudaError_t error) {
  for (const ErrorText& e : kErrors) {
    if (e.error == error) return &e;
  }
  return nullptr;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  FAKE_CUDA_BEGIN();
  *count = state().options.devices;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  FAKE_CUDA_BEGIN();
  if (!is_device(device)) return note(cudaErrorInvalidDevice);
  set_current_device(device);
  state().make_context(device);  // since CUDA 12
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  const cudaError_t begun = state().begin_call(__func__, CallKind::kUncounted);
  if (begun != cudaSuccess) return note(begun);
  *device = current_device();
  return cudaSuccess;
}

cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
  FAKE_CUDA_BEGIN();
  return is_device(device) ? cudaSuccess : note(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attr, int device) {
  FAKE_CUDA_BEGIN();
  if (!is_device(device)) return note(cudaErrorInvalidDevice);
  return attribute(attr, device, value);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
  FAKE_CUDA_BEGIN();
  if (!is_device(device)) return note(cudaErrorInvalidDevice);
  std::memset(static_cast<void*>(prop), 0, sizeof *prop);
  std::snprintf(prop->name, sizeof prop->name, "Fake CUDA device (a test tool)");
  prop->uuid.bytes[0] = static_cast<char>(device + 1);
  prop->totalGlobalMem = state().options.memory_bytes;
  prop->sharedMemPerBlock = kSmemPerBlock;
  prop->sharedMemPerBlockOptin = kSmemPerBlockOptin;
  prop->sharedMemPerMultiprocessor = kSmemPerBlockOptin + 1024;
  prop->regsPerBlock = prop->regsPerMultiprocessor = 65536;
  prop->warpSize = 32;
  prop->maxThreadsPerBlock = kThreadsPerBlock;
  prop->maxThreadsPerMultiProcessor = kThreadsPerMultiprocessor;
  prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = kThreadsPerBlock;
  prop->maxThreadsDim[2] = 64;
  prop->maxGridSize[0] = INT32_MAX;
  prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
  prop->major = 9;
  prop->multiProcessorCount = kMultiprocessors;
  prop->concurrentKernels = prop->unifiedAddressing = prop->canMapHostMemory = 1;
  prop->streamPrioritiesSupported = prop->memoryPoolsSupported = 1;
  prop->hostRegisterSupported = 1;
  prop->asyncEngineCount = 2;
  prop->maxBlocksPerMultiProcessor = 32;
  prop->l2CacheSize = 50 << 20;
  prop->pciBusID = device + 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  FAKE_CUDA_BEGIN();
  if (!is_device(device)) return note(cudaErrorInvalidDevice);
  std::snprintf(text, static_cast<size_t>(bytes), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  FAKE_CUDA_BEGIN();
  if (lowest != nullptr) *lowest = kLowestPriority;
  if (highest != nullptr) *highest = kHighestPriority;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  FAKE_CUDA_BEGIN();
  state().count_host_wait();
  for (const auto& stream : state().streams_of(current_device())) stream->drain();
  return note(state().execution_error());
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  FAKE_CUDA_BEGIN();
  if (!is_device(device) || !is_device(peer)) return note(cudaErrorInvalidDevice);
  *can = device != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  FAKE_CUDA_BEGIN();
  return is_device(peer) && peer != current_device() ? cudaSuccess : note(cudaErrorInvalidDevice);
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = state().options.driver ? CUDART_VERSION : 0;
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t error) {
  const ErrorText* e = find(error);
  return e == nullptr ? "unrecognized error code" : e->name;
}

const char* cudaGetErrorString(cudaError_t error) {
  const ErrorText* e = find(error);
  return e == nullptr ? "unrecognized error code" : e->text;
}

}  // extern "C"
