// Streams of the caller.
#include "cuda/cuda_device_class.h"
#include "cuda/graph_capture.h"

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

Result<std::shared_ptr<GraphCapture>> CudaDevice::capture_graph(void* stream) {
  SOTTO_ASSIGN(const cudaStreamCaptureStatus capture, capture_of(stream));
  if (capture == cudaStreamCaptureStatusNone) return std::shared_ptr<GraphCapture>();
  if (capture == cudaStreamCaptureStatusActive) {
    // The handle is another stream in each thread, and calls are captured by the thread that
    // drives, and by NCCL's.
    if (stream == cudaStreamPerThread) {
      return invalid_argument(
          "a step on cuda:{} cannot be captured on cudaStreamPerThread, which is another stream in "
          "the threads that capture it; capture a stream of your own",
          index_);
    }
    return CudaGraphCapture::make(shared_from_this(), static_cast<cudaStream_t>(stream));
  }
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

// Calls of the driver need a context that is bound to the thread. That the device is current
// already need not mean that.
Status CudaDevice::bind_context() const { return check(cudaSetDevice(index_), "cudaSetDevice"); }

Result<BlockId> CudaDevice::block_stream(void* stream) {
  const OnDevice current(index_);
  SOTTO_TRY(current.status());
  SOTTO_TRY(bind_context());
  return blocks_.block(static_cast<CUstream>(stream));
}

Status CudaDevice::unblock_behind(uint32_t lane, BlockId block) {
  const OnDevice current(index_);
  SOTTO_TRY(current.status());
  SOTTO_TRY(bind_context());
  SOTTO_ASSIGN(const cudaStream_t behind, stream_of(lane));
  return blocks_.unblock_behind(behind, block);
}

}  // namespace sotto
