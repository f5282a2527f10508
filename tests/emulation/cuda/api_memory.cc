// Memory, pools, copies.
#include <cstring>

#include "tests/emulation/cuda/contexts.h"
#include "tests/emulation/cuda/state.h"

using namespace sotto::fake_cuda;

namespace {

cudaError_t allocate_into(void** at, size_t bytes, MemoryKind kind, int device) {
  if (at == nullptr) return note(cudaErrorInvalidValue);
  *at = nullptr;
  if (bytes == 0) return cudaSuccess;
  *at = state().memory.alloc(bytes, kind, device, state().options.memory_bytes);
  return *at == nullptr ? note(cudaErrorMemoryAllocation) : cudaSuccess;
}

void drain_device(int device) {
  state().count_host_wait();
  for (const auto& stream : state().streams_of(device)) stream->drain();
}

// Free calls work also when they are made to fail: there is nothing else that a caller could do.
cudaError_t give_back(void* at, MemoryKind kind, const char* call) {
  const cudaError_t begun = state().begin_call(call);
  if (at == nullptr || begun == cudaErrorInsufficientDriver) return note(begun);
  state().memory.check_free(at, kind, call);
  Block block;
  state().memory.find(at, &block);
  drain_device(block.device);
  state().memory.free(at, kind, call);
  return note(begun);
}

bool in_device_memory(const void* at) {
  Block block;
  return state().memory.find(at, &block) && block.kind == MemoryKind::kDevice;
}

bool is_pageable(const void* at) {
  Block block;
  return !state().memory.reaches_host() && !state().memory.find(at, &block);
}

struct Sides {
  bool dst_device, src_device;
};

Sides sides(void* dst, const void* src, cudaMemcpyKind kind, const char* call) {
  switch (kind) {
    case cudaMemcpyHostToHost: return {false, false};
    case cudaMemcpyHostToDevice: return {true, false};
    case cudaMemcpyDeviceToHost: return {false, true};
    case cudaMemcpyDeviceToDevice: return {true, true};
    case cudaMemcpyDefault: return {in_device_memory(dst), in_device_memory(src)};
  }
  misuse(std::string(call) + ": unknown kind of copy " + std::to_string(kind));
}

void check_overlap(const void* dst, const void* src, size_t bytes, const char* call) {
  const auto* d = static_cast<const char*>(dst);
  const auto* s = static_cast<const char*>(src);
  if (d < s + bytes && s < d + bytes)
    misuse(std::string(call) + " of " + std::to_string(bytes) +
           " bytes onto memory that overlaps their source");
}

// Returns whether the host has waited.
bool copy(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, const Ref<Stream>& stream,
          const char* call) {
  if (bytes == 0) return false;
  const Sides on = sides(dst, src, kind, call);
  state().memory.check(dst, bytes, on.dst_device, call);
  state().memory.check(src, bytes, on.src_device, call);
  check_overlap(dst, src, bytes, call);
  if (on.src_device && !on.dst_device) state().count_copy_to_host();
  if (on.dst_device && !on.src_device && is_pageable(src)) {  // staged before the call returns
    const auto* from = static_cast<const char*>(src);
    const auto staged = make_ref<std::vector<char>>(from, from + bytes);
    state().submit(stream, [=] { std::memcpy(dst, staged->data(), bytes); });
    return false;
  }
  // Pinned memory is read when the copy executes, so that a buffer that is reused too early shows.
  state().submit(stream, [=] { std::memcpy(dst, src, bytes); });
  if (on.dst_device || !is_pageable(dst)) return false;
  state().count_host_wait();
  if (state().options.context_lock) {
    contexts_of_devices().wait_locked(stream->device(), {stream},
                                      std::string(call) + " to pageable memory");
  }
  stream->drain();
  return true;
}

}  // namespace

extern "C" {

void fake_cuda_check_reachable(const void* at, size_t bytes, const char* call) {
  state().memory.check_reachable(at, bytes, call);
}

cudaError_t cudaMalloc(void** at, size_t bytes) {
  FAKE_CUDA_BEGIN();
  return allocate_into(at, bytes, MemoryKind::kDevice, current_device());
}

cudaError_t cudaFree(void* at) { return give_back(at, MemoryKind::kDevice, __func__); }

cudaError_t cudaMallocHost(void** at, size_t bytes) {
  FAKE_CUDA_BEGIN();
  return allocate_into(at, bytes, MemoryKind::kPinned, current_device());
}

cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned) {
  FAKE_CUDA_BEGIN();
  return allocate_into(at, bytes, MemoryKind::kPinned, current_device());
}

cudaError_t cudaFreeHost(void* at) { return give_back(at, MemoryKind::kPinned, __func__); }

cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) {
  FAKE_CUDA_BEGIN();
  if (at == nullptr || bytes == 0) return note(cudaErrorInvalidValue);
  state().memory.register_host(at, bytes, current_device());
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* at) {
  return give_back(at, MemoryKind::kRegistered, __func__);
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  FAKE_CUDA_BEGIN();
  if (is_pageable(host) || in_device_memory(host)) return note(cudaErrorInvalidValue);
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  FAKE_CUDA_BEGIN();
  *total = state().options.memory_bytes;
  *free = *total - state().memory.used(current_device());
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* at) {
  FAKE_CUDA_BEGIN();
  std::memset(static_cast<void*>(attributes), 0, sizeof *attributes);
  Block block;
  if (!state().memory.find(at, &block)) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    return cudaSuccess;
  }
  attributes->device = block.device;
  attributes->devicePointer = const_cast<void*>(at);
  attributes->type = block.kind == MemoryKind::kDevice ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  if (block.kind != MemoryKind::kDevice) attributes->hostPointer = const_cast<void*>(at);
  return cudaSuccess;
}

// ---- Stream-ordered memory ----

cudaError_t cudaMallocAsync(void** at, size_t bytes, cudaStream_t stream) {
  FAKE_CUDA_BEGIN();
  const auto s = state().stream(stream, __func__);
  return allocate_into(at, bytes, MemoryKind::kDevice, s->device());
}

cudaError_t cudaMallocFromPoolAsync(void** at, size_t bytes, cudaMemPool_t pool,
                                    cudaStream_t stream) {
  FAKE_CUDA_BEGIN();
  state().stream(stream, __func__);
  return allocate_into(at, bytes, MemoryKind::kDevice, state().pool(pool, __func__).device);
}

cudaError_t cudaFreeAsync(void* at, cudaStream_t stream) {
  const cudaError_t begun = state().begin_call(__func__);
  if (at == nullptr || begun == cudaErrorInsufficientDriver) return note(begun);
  const auto s = state().stream(stream, __func__);
  state().memory.mark_freeing(at, __func__);
  state().order_with_default_stream(s);
  s->push_always([at] { state().memory.free(at, MemoryKind::kDevice, "cudaFreeAsync"); });
  return note(begun);
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* props) {
  FAKE_CUDA_BEGIN();
  if (props->location.type != cudaMemLocationTypeDevice) return note(cudaErrorNotSupported);
  *pool = state().add_pool({props->location.id, false, 0, {}});
  return cudaSuccess;
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  const cudaError_t begun = state().begin_call(__func__);
  if (begun != cudaErrorInsufficientDriver) state().remove_pool(pool);
  return note(begun);
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  FAKE_CUDA_BEGIN();
  *pool = state().default_pool(device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
  FAKE_CUDA_BEGIN();
  *pool = state().device_pool(device);
  return cudaSuccess;
}

cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t pool) {
  FAKE_CUDA_BEGIN();
  if (state().pool(pool, __func__).device != device) return note(cudaErrorInvalidValue);
  state().set_device_pool(device, pool);
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attr, void* value) {
  FAKE_CUDA_BEGIN();
  Pool p = state().pool(pool, __func__);
  if (attr == cudaMemPoolAttrReleaseThreshold) {
    p.release_threshold = *static_cast<uint64_t*>(value);
    state().set_pool(pool, p);
  }
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attr, void* value) {
  FAKE_CUDA_BEGIN();
  const Pool p = state().pool(pool, __func__);
  switch (attr) {
    case cudaMemPoolAttrReleaseThreshold:
      *static_cast<uint64_t*>(value) = p.release_threshold;
      break;
    case cudaMemPoolAttrReservedMemCurrent:
    case cudaMemPoolAttrUsedMemCurrent:
      *static_cast<uint64_t*>(value) = state().memory.used(p.device);
      break;
    default: misuse("cudaMemPoolGetAttribute " + std::to_string(attr) + " is not modelled");
  }
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc* list, size_t count) {
  FAKE_CUDA_BEGIN();
  Pool p = state().pool(pool, __func__);
  for (size_t i = 0; i < count; ++i) {
    const cudaMemLocation& to = list[i].location;
    if (to.type != cudaMemLocationTypeDevice || to.id < 0 || to.id >= state().options.devices ||
        to.id == p.device)
      return note(cudaErrorInvalidValue);
    if (list[i].flags == cudaMemAccessFlagsProtReadWrite) {
      p.peers.insert(to.id);
    } else {
      p.peers.erase(to.id);
    }
  }
  state().set_pool(pool, p);
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAccess(cudaMemAccessFlags* flags, cudaMemPool_t pool,
                                 cudaMemLocation* location) {
  FAKE_CUDA_BEGIN();
  const Pool p = state().pool(pool, __func__);
  const bool may = location->id == p.device || p.peers.contains(location->id);
  *flags = may ? cudaMemAccessFlagsProtReadWrite : cudaMemAccessFlagsProtNone;
  return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t) {
  FAKE_CUDA_BEGIN();
  state().pool(pool, __func__);
  return cudaSuccess;
}

// ---- Copies and fills ----

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  FAKE_CUDA_BEGIN();
  copy(dst, src, bytes, kind, state().stream(stream, __func__), __func__);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind) {
  FAKE_CUDA_BEGIN();
  const auto stream = state().stream(nullptr, __func__);
  const bool waited = copy(dst, src, bytes, kind, stream, __func__);
  if (!waited && kind != cudaMemcpyDeviceToDevice) {
    state().count_host_wait();
    stream->drain();
  }
  return note(state().execution_error());
}

cudaError_t cudaMemcpyPeerAsync(void* dst, int dst_device, const void* src, int src_device,
                                size_t bytes, cudaStream_t stream) {
  FAKE_CUDA_BEGIN();
  Block to, from;
  if (bytes != 0 && state().memory.find(dst, &to) && state().memory.find(src, &from) &&
      (to.device != dst_device || from.device != src_device))
    misuse("cudaMemcpyPeerAsync: the memory is on other devices than the call says");
  copy(dst, src, bytes, cudaMemcpyDeviceToDevice, state().stream(stream, __func__), __func__);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  FAKE_CUDA_BEGIN();
  const auto s = state().stream(stream, __func__);
  if (bytes == 0) return cudaSuccess;
  state().memory.check_reachable(at, bytes, __func__);
  state().submit(s, [=] { std::memset(at, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  return cudaMemsetAsync(at, value, bytes, nullptr);
}

}  // extern "C"
