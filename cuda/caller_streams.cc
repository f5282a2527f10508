// Streams of the caller.
#include <atomic>

#include "cuda/cuda_device_class.h"
#include "cuda/graph_recorder.h"

namespace sotto {

Result<cudaStreamCaptureStatus> CudaDevice::capture_of(void* stream) const {
  const OnDevice current(index_);
  SOTTO_TRY(current.status());
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t asked = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture);
  if (asked == cudaErrorStreamCaptureImplicit) {
    // Another stream is captured that the default stream would have to be ordered with.
    forget_cuda_error(asked);
    return cudaStreamCaptureStatusInvalidated;
  }
  SOTTO_TRY(check(asked, "cudaStreamIsCapturing"));
  return capture;
}

Status CudaDevice::check_stream(void* stream) const {
  SOTTO_ASSIGN(const cudaStreamCaptureStatus capture, capture_of(stream));
  if (capture == cudaStreamCaptureStatusNone) return ok_status();
  return invalid_state(
      "the stream on cuda:{} is being captured into a CUDA graph, which of all operations "
      "optimizer steps alone can be part of; call between graphs, or name another stream",
      index_);
}

Result<std::shared_ptr<GraphRecorder>> CudaDevice::record_graph(void* stream) {
  SOTTO_ASSIGN(const cudaStreamCaptureStatus capture, capture_of(stream));
  if (capture == cudaStreamCaptureStatusNone) return std::shared_ptr<GraphRecorder>();
  if (capture == cudaStreamCaptureStatusActive)
    return CudaGraphRecorder::make(shared_from_this(), static_cast<cudaStream_t>(stream));
  return invalid_state("the capture of the stream on cuda:{} into a CUDA graph is spoilt", index_);
}

Result<EventId> CudaDevice::record_stream(void* stream) {
  return record_on(static_cast<cudaStream_t>(stream));
}

Status CudaDevice::stream_after_event(void* stream, EventId event) {
  const OnDevice current(index_);
  SOTTO_TRY(current.status());
  return check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event_of(event), 0),
               "cudaStreamWaitEvent");
}

Result<HoldId> CudaDevice::hold_stream(void* stream) {
  if (wait_value_ == nullptr) {
    return unsupported(
        "a stream cannot wait for an operation that needs the host: this driver has no "
        "cuStreamWaitValue32; use sotto_op_wait");
  }
  const OnDevice current(index_);
  SOTTO_TRY(current.status());
  std::lock_guard lock(mutex_);
  if (free_holds_.empty()) {
    if (hold_values_.size() == kHolds) {
      return error(Code::kDevice, "{} streams of cuda:{} wait for operations already, the limit",
                   kHolds, index_);
    }
    hold_values_.push_back(0);
    free_holds_.push_back(hold_values_.size());
  }
  const HoldId hold = free_holds_.back();
  uint32_t* word = hold_words_ + (hold - 1);
  const CUresult result =
      wait_value_(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(word),
                  hold_values_[hold - 1] + 1, CU_STREAM_WAIT_VALUE_GEQ);
  if (result != CUDA_SUCCESS) {
    return error(Code::kDevice, "cuStreamWaitValue32 on cuda:{}: error {} of the driver", index_,
                 static_cast<int>(result));
  }
  free_holds_.pop_back();
  return hold;
}

void CudaDevice::let_go(HoldId hold) {
  std::lock_guard lock(mutex_);
  uint32_t* word = hold_words_ + (hold - 1);
  std::atomic_ref<uint32_t>(*word).store(++hold_values_[hold - 1], std::memory_order_release);
  free_holds_.push_back(hold);
}

}  // namespace sotto
