// Streams of the caller.
#include <atomic>

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
  if (capture == cudaStreamCaptureStatusActive)
    return CudaGraphCapture::make(shared_from_this(), static_cast<cudaStream_t>(stream));
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

Result<BlockId> CudaDevice::block_stream(void* stream) {
  if (wait_value_ == nullptr) {
    return unsupported(
        "a stream cannot wait for an operation that needs the host: this driver has no "
        "cuStreamWaitValue32; use sotto_op_wait");
  }
  const OnDevice current(index_);
  SOTTO_TRY(current.status());
  std::lock_guard lock(mutex_);
  if (free_blocks_.empty()) {
    if (block_values_.size() == kBlocks) {
      return error(Code::kDevice, "{} streams of cuda:{} wait for operations already, the limit",
                   kBlocks, index_);
    }
    block_values_.push_back(0);
    free_blocks_.push_back(block_values_.size());
  }
  const BlockId block = free_blocks_.back();
  uint32_t* word = block_words_ + (block - 1);
  const CUresult result =
      wait_value_(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(word),
                  block_values_[block - 1] + 1, CU_STREAM_WAIT_VALUE_GEQ);
  if (result != CUDA_SUCCESS) {
    return error(Code::kDevice, "cuStreamWaitValue32 on cuda:{}: error {} of the driver", index_,
                 static_cast<int>(result));
  }
  free_blocks_.pop_back();
  return block;
}

void CudaDevice::unblock(BlockId block) {
  std::lock_guard lock(mutex_);
  uint32_t* word = block_words_ + (block - 1);
  std::atomic_ref<uint32_t>(*word).store(++block_values_[block - 1], std::memory_order_release);
  free_blocks_.push_back(block);
}

}  // namespace sotto
