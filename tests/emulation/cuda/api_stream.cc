// Streams, events, host functions, waits for a word in memory.
#include <cuda.h>

#include <cstring>
#include <thread>

#include "tests/emulation/cuda/capture.h"
#include "tests/emulation/cuda/state.h"

using namespace sotto::fake_cuda;

namespace {

bool reached(uint32_t word, uint32_t value, unsigned flags) {
  switch (flags) {
    case CU_STREAM_WAIT_VALUE_GEQ: return static_cast<int32_t>(word - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ: return word == value;
    case CU_STREAM_WAIT_VALUE_AND: return (word & value) != 0;
    case CU_STREAM_WAIT_VALUE_NOR: return ~(word | value) != 0;
    default: misuse("cuStreamWaitValue32: unknown flags " + std::to_string(flags));
  }
}

bool captured(const Ref<Stream>& s) {
  return captures().status(s->number()) != cudaStreamCaptureStatusNone;
}

// What a captured stream does not take.
cudaError_t refuse_captured(const Ref<Stream>& s, cudaError_t error) {
  captures().spoil(s->number());
  return note(error);
}

// The driver's cuStreamWaitValue32: later work of the stream starts when the word has a value.
CUresult wait_value(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags) {
  constexpr const char* kCall = "cuStreamWaitValue32";
  if (note(state().begin_call(kCall)) != cudaSuccess) return CUDA_ERROR_UNKNOWN;
  if (!context_is_bound()) return CUDA_ERROR_INVALID_CONTEXT;
  auto* const word = reinterpret_cast<uint32_t*>(at);
  const auto s = state().stream(stream, kCall);
  if (captured(s)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  state().memory.check_reachable(word, sizeof *word, kCall);
  state().order_with_default_stream(s);
  const auto is_reached = [=](uint32_t now) { return reached(now, value, flags); };
  const uint64_t hold = state().add_hold(s->device(), word, is_reached);
  s->push_wait([=] {
    const auto now = [=] { return std::atomic_ref(*word).load(std::memory_order_acquire); };
    while (!is_reached(now()) && state().execution_error() == cudaSuccess)
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    state().remove_hold(hold);
  });
  return CUDA_SUCCESS;
}

// The driver's cuStreamWriteValue32: the word has the value when the stream has come so far.
CUresult write_value(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags) {
  constexpr const char* kCall = "cuStreamWriteValue32";
  if (note(state().begin_call(kCall)) != cudaSuccess) return CUDA_ERROR_UNKNOWN;
  if (!context_is_bound()) return CUDA_ERROR_INVALID_CONTEXT;
  if (flags != CU_STREAM_WRITE_VALUE_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
  auto* const word = reinterpret_cast<uint32_t*>(at);
  const auto s = state().stream(stream, kCall);
  if (captured(s)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  state().memory.check_reachable(word, sizeof *word, kCall);
  state().queue_end_of_holds(word, value);
  state().submit(s, [=] { std::atomic_ref(*word).store(value, std::memory_order_release); });
  return CUDA_SUCCESS;
}

CUresult context_state(CUdevice device, unsigned* flags, int* active) {
  if (note(state().begin_call("cuDevicePrimaryCtxGetState")) != cudaSuccess)
    return CUDA_ERROR_UNKNOWN;
  *flags = 0;
  *active = state().has_context(device) ? 1 : 0;
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  FAKE_CUDA_BEGIN();
  *function = nullptr;
  if (std::strcmp(symbol, "cuStreamWaitValue32") == 0)
    *function = reinterpret_cast<void*>(&wait_value);
  if (std::strcmp(symbol, "cuStreamWriteValue32") == 0)
    *function = reinterpret_cast<void*>(&write_value);
  if (std::strcmp(symbol, "cuDevicePrimaryCtxGetState") == 0)
    *function = reinterpret_cast<void*>(&context_state);
  const bool known = *function != nullptr;
  if (found != nullptr)
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  FAKE_CUDA_BEGIN();
  if (flags != cudaStreamDefault && flags != cudaStreamNonBlocking)
    return note(cudaErrorInvalidValue);
  *stream = state().add_stream(state().new_stream(current_device(), flags, priority));
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  FAKE_CUDA_BEGIN();
  if (flags != cudaStreamDefault && flags != cudaStreamNonBlocking)
    return note(cudaErrorInvalidValue);
  *stream = state().add_stream(state().new_stream(current_device(), flags, 0));
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  FAKE_CUDA_BEGIN();
  *stream = state().add_stream(state().new_stream(current_device(), cudaStreamDefault, 0));
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t begun = state().begin_call(__func__);
  if (begun != cudaErrorInsufficientDriver) state().remove_stream(stream);
  return note(begun);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  FAKE_CUDA_BEGIN();
  const auto s = state().stream(stream, __func__);
  if (captured(s)) return refuse_captured(s, cudaErrorStreamCaptureUnsupported);
  state().count_host_wait();
  state().order_with_default_stream(s);
  s->drain();
  return note(state().execution_error());
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const cudaError_t begun = state().begin_call(__func__, CallKind::kQuery);
  if (begun != cudaSuccess) return note(begun);
  const auto s = state().stream(stream, __func__);
  if (captured(s)) return refuse_captured(s, cudaErrorStreamCaptureUnsupported);
  return s->idle() ? cudaSuccess : note(cudaErrorNotReady);
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  FAKE_CUDA_BEGIN();
  *device = state().stream(stream, __func__)->device();
  return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  FAKE_CUDA_BEGIN();
  *flags = state().stream(stream, __func__)->flags();
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  FAKE_CUDA_BEGIN();
  *priority = state().stream(stream, __func__)->priority();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  FAKE_CUDA_BEGIN();
  const auto s = state().stream(stream, __func__);
  if (captured(s)) return refuse_captured(s, cudaErrorStreamCaptureIsolation);
  const auto marker = state().last_record(*state().event(event, __func__));  // bound now
  if (marker == nullptr) return cudaSuccess;
  if (state().wait_is_dropped({s->number(), marker->stream(), marker->record()}))
    return cudaSuccess;
  state().order_with_default_stream(s);
  s->wait_for(marker);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* user) {
  FAKE_CUDA_BEGIN();
  if (function == nullptr) return note(cudaErrorInvalidValue);
  state().submit(state().stream(stream, __func__), [=] { function(user); });
  return cudaSuccess;
}

// ---- Events ----

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  FAKE_CUDA_BEGIN();
  if ((flags & ~(cudaEventBlockingSync | cudaEventDisableTiming)) != 0)
    return note(cudaErrorNotSupported);
  auto made = make_ref<Event>();
  made->device = current_device();
  made->flags = flags;
  *event = state().add_event(std::move(made));
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  FAKE_CUDA_BEGIN();
  auto made = make_ref<Event>();
  made->device = current_device();
  *event = state().add_event(std::move(made));
  return cudaSuccess;
}

// What waits for it goes on waiting for its latest record.
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const cudaError_t begun = state().begin_call(__func__);
  if (begun != cudaErrorInsufficientDriver) state().remove_event(event);
  return note(begun);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  FAKE_CUDA_BEGIN();
  const auto s = state().stream(stream, __func__);
  const auto e = state().event(event, __func__);
  if (e->device != s->device()) {
    misuse("cudaEventRecord of an event of device " + std::to_string(e->device) +
           " on a stream of device " + std::to_string(s->device()));
  }
  if (captured(s))
    misuse("cudaEventRecord on a captured stream: that others join a capture is not modelled");
  state().order_with_default_stream(s);
  state().record(*e, s->record());
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const cudaError_t begun = state().begin_call(__func__, CallKind::kQuery);
  if (begun != cudaSuccess) return note(begun);
  const auto marker = state().last_record(*state().event(event, __func__));
  if (marker != nullptr && !marker->done()) return note(cudaErrorNotReady);
  return note(state().execution_error());
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  FAKE_CUDA_BEGIN();
  const auto marker = state().last_record(*state().event(event, __func__));
  state().count_host_wait();
  if (marker != nullptr) marker->wait();
  return note(state().execution_error());
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  FAKE_CUDA_BEGIN();
  const auto a = state().event(start, __func__), b = state().event(end, __func__);
  if (((a->flags | b->flags) & cudaEventDisableTiming) != 0)
    return note(cudaErrorInvalidResourceHandle);
  const auto from = state().last_record(*a), to = state().last_record(*b);
  if (from == nullptr || to == nullptr) return note(cudaErrorInvalidResourceHandle);
  if (!from->done() || !to->done()) return note(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(to->at() - from->at()).count();
  return cudaSuccess;
}

}  // extern "C"
